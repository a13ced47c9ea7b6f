"""Recognising batches that lie in memory just as the last one did, in half a microsecond.

`batch_pattern` recognises batches for which a program was captured; of these, programs accept some that lie
otherwise, and not all. Calls of a training loop are alike, and one comparison in C says that.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

BatchReader = Callable[[Any], tuple[Tensor, ...] | None]
"""The tensors of a batch like the example, in the order of `pytree`; None for any other."""
_CONSTANTS = (bool, int, str, type(None))


def usual_batch(example: Any, tensors: Sequence[Tensor]) -> BatchReader | None:
    """What recognises batches like this one; None where that takes another look at each.

    Alike are structure, and class, shape, strides, dtype, device and flags of the tensors, none of which
    stands there twice; constants are the same objects.

    Args:
        example: A nest of tuples, lists and dictionaries, or what has no such reader.
        tensors: All that it holds, in order.

    Cost: When called, 0.3 us and 0.1 us a tensor.
    """
    unpacking = _Unpacking(tensors)
    if not unpacking.takes("batch", example) or not tensors:
        return None
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    sizes: Any = [[*tensor.shape] for tensor in tensors]  # the stubs know of one tensor only
    strides: Any = [[*tensor.stride()] for tensor in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return unpacking.reader(guards.check)


class _Unpacking:
    """Source text that takes a batch apart."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._order = [*map(id, tensors)]
        self._found: dict[int, str] = {}
        self._lines: list[str] = []
        self._scope: dict[str, Any] = {"GONE": (LookupError, TypeError)}
        self._num_names = 0

    def takes(self, name: str, value: Any) -> bool:
        """Add the lines for a part that is in a variable; whether it is one that can be taken apart."""
        kind = type(value)
        if isinstance(value, Tensor):
            self._found[id(value)] = name
            return True
        if kind in _CONSTANTS:
            self._require(f"{name} is {self._constant(value)}")
            return True
        if kind not in (tuple, list, dict):
            return False
        self._require(f"type({name}) is {kind.__name__} and len({name}) == {len(value)}")
        keys = value if kind is dict else range(len(value))
        # Written into source text, where other keys would have to be rebuilt.
        if not all(type(key) in (int, str) for key in keys):
            return False
        if kind is dict and len(value) > 1:  # code may go through them in their order
            self._require(f"[*{name}] == {[*keys]!r}")
        parts = [(self._variable(f"{name}[{key!r}]"), value[key]) for key in keys]
        return all(self.takes(part, held) for part, held in parts)

    def reader(self, check: Callable[..., bool]) -> BatchReader | None:
        """The function; None where a tensor stands in two places."""
        if len(set(self._order)) != len(self._order):
            return None
        names = ", ".join(self._found[key] for key in self._order)
        self._scope["check"] = check
        lines = (*self._lines, f"return ({names},) if check({names}) else None")
        body = "".join(f"        {line}\n" for line in lines)
        source = f"def read(batch):\n    try:\n{body}    except GONE:\n        return None\n"
        exec(compile(source, "<usual batch>", "exec"), self._scope)
        read: BatchReader = self._scope["read"]
        return read

    def _require(self, term: str) -> None:
        self._lines.append(f"if not ({term}): return None")

    def _variable(self, expression: str) -> str:
        self._num_names += 1
        self._lines.append(f"v{self._num_names} = {expression}")
        return f"v{self._num_names}"

    def _constant(self, value: Any) -> str:
        self._num_names += 1
        self._scope[f"c{self._num_names}"] = value
        return f"c{self._num_names}"
