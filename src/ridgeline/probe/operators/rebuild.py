"""From the text of a traced operator back to a call: the overload, its arguments, its dtypes."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ridgeline.errors import WorkloadError
from ridgeline.workload import Op, TensorSpec

Arguments = tuple[list[Any], dict[str, Any]]


def resolve(name: str) -> Callable[..., Any]:
    """The operator overload called `name`, e.g. `aten.add.Tensor`.

    Raises:
        WorkloadError: torch here has no such operator.
    """
    found: Any = torch.ops
    parts = name.replace("::", ".").split(".")
    # Operators without overloads are traced without `default`.
    if len(parts) == 2:
        parts.append("default")
    for part in parts:
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError) as error:
            raise WorkloadError(
                f"wanted the operator {name} of the workload, got none of that name in torch "
                f"{torch.__version__}; trace the workload again with this torch"
            ) from error
    return found


def with_seeds_in_reach(
    name: str, call: Callable[..., Any], device: torch.device
) -> Callable[..., Any]:
    """A call whose seeds of random numbers lie where the operator reads them, whoever made them.

    The backward pass of memory-efficient attention reads them on the host, and in a capture on the GPU; what
    lies elsewhere ends the process. Source: seen with torch 2.11 (signal 11); its forward pass returns
    tensors of the host but while a graph is captured. Other operators' calls are returned as they are.
    """
    if device.type != "cuda" or "_efficient_attention_backward" not in name:
        return call
    seeds = [i for i, one in enumerate(schema(name)) if one.name.startswith("philox_")]
    host = torch.zeros((), dtype=torch.int64, device="cpu")
    there = host.to(device)

    def issue(*args: Any, **kwargs: Any) -> Any:
        is_captured = torch.cuda.is_current_stream_capturing()
        moved = [*args]
        for index in seeds:
            if moved[index].is_cuda != is_captured:
                moved[index] = there if is_captured else host
        return call(*moved, **kwargs)

    return issue


def schema(name: str) -> list[Any]:
    """The arguments that the operator called `name` takes, each with its name and default.

    Raises:
        WorkloadError: torch here has no such operator.
    """
    overload: Any = resolve(name)
    return list(overload._schema.arguments)  # noqa: SLF001 - torch has no public way


def parse(op: Op) -> Arguments:
    """Positional and keyword arguments of an op, tensors still as `{"tensor": i}`.

    Raises:
        WorkloadError: the text is not what tracing writes.
    """
    content = msgspec.json.decode(op.arguments)
    if isinstance(content, dict) and set(content) == {"args", "kwargs"}:
        return content["args"], content["kwargs"]
    raise WorkloadError(
        f'wanted arguments of {op.name} as {{"args": [...], "kwargs": {{...}}}}, got {op.arguments[:80]!r}; '
        "trace the workload again with this release"
    )


def fill(
    value: Any, tensors: Sequence[Tensor], device: torch.device, *, has_host: bool = False
) -> Any:
    """`value` with encoded tensors, dtypes, devices, layouts and memory formats put in place.

    `tensors` are the op's inputs. A step that was traced on a GPU `has_host`: by `cpu` it means the host.
    """
    if isinstance(value, list):
        return [fill(inner, tensors, device, has_host=has_host) for inner in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "device" in value:
        # What a step on a CPU calls `cpu` is the device itself.
        return torch.device("cpu") if has_host and value["device"] == "cpu" else device
    for kind in ("dtype", "layout", "memory_format"):
        if kind in value:
            return getattr(torch, str(value[kind]).removeprefix("torch."))
    if "float" in value:  # infinities and NaN, which JSON numbers cannot say
        return float(value["float"])
    if "complex" in value:
        return complex(*value["complex"])
    if "generator" in value:
        return None
    raise WorkloadError(
        "wanted an encoded argument (tensor, dtype, device, layout, memory_format, float, complex, "
        f"generator), got {value!r}; trace the workload again with this release"
    )


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a spec.

    Raises:
        WorkloadError: torch has no dtype of that name.
    """
    dtype = getattr(torch, spec.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WorkloadError(
            f"wanted a torch dtype, got {spec.dtype!r} in a tensor of the workload; trace it again"
        )
    return dtype


class NamedArguments:
    """The arguments of an op by the names that its schema gives them; tensors as their specs."""

    def __init__(self, op: Op) -> None:
        self._op = op
        args, kwargs = parse(op)
        entries = schema(op.name)
        self._values: dict[str, Any] = {
            entry.name: entry.default_value for entry in entries if entry.has_default_value()
        }
        # Defaults first, so that what the call gave replaces them.
        self._values |= {entry.name: value for entry, value in zip(entries, args, strict=False)}
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
        return [
            entry["tensor"] if isinstance(entry, dict) and "tensor" in entry else None
            for entry in values
        ]

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
