"""The arguments of a traced operator by the names that its schema gives them."""

from typing import Any

from ridgeline.probe.operators import rebuild
from ridgeline.workload import Op, TensorSpec


class NamedArguments:
    """The arguments of an op by name; tensors as their specs."""

    def __init__(self, op: Op) -> None:
        self._op = op
        args, kwargs = rebuild.parse(op)
        schema = rebuild.schema(op.name)
        self._values: dict[str, Any] = {
            entry.name: entry.default_value for entry in schema if entry.has_default_value()
        }
        self._values |= {entry.name: value for entry, value in zip(schema, args, strict=False)}
        self._values |= kwargs

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """A plain value, still encoded if it is none of JSON's."""
        return self._values.get(name)

    def positions(self, name: str) -> list[int | None]:
        """Where the tensors of an argument are among the op's inputs; None for one that is left out."""
        value = self._values.get(name)
        values = value if isinstance(value, list) else [value]
        return [entry["tensor"] if _is_tensor(entry) else None for entry in values]

    def spec(self, name: str) -> TensorSpec | None:
        """The tensor of an argument; None where it was given none."""
        (position, *_) = self.positions(name) or [None]
        return None if position is None else self._op.inputs[position]

    def at(self, position: int) -> TensorSpec:
        """The tensor at a position of the op's inputs."""
        return self._op.inputs[position]

    def made(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an output; () where there is none."""
        outputs = self._op.outputs
        return outputs[position].shape if position < len(outputs) else ()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the tensor of an argument; () where there is none."""
        spec = self.spec(name)
        return () if spec is None else spec.shape


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "tensor" in value
