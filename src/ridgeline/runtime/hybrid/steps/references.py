"""What a loss function reaches by name: compared before every step, since a trace took it for granted.

Tensors and plain values are found by `CallState`; here are the objects around them. Another teacher network
under the same name, or in the list that the loss reads, is another program.
"""

import functools
import types
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.runtime.hybrid.calls.state import CallState
from ridgeline.runtime.hybrid.steps.entries import Entries

MOST_ENTRIES = 256
"""Of larger containers only the identity is compared."""
_DEPTH = 3
_EMPTY = object()


class References:
    """The objects that a loss function reads, by identity; its tensors by address, plain values by equality.

    Args:
        loss_fn: A function, method, partial or callable object.

    Attributes:
        modules: The networks among them, besides the model that it is called with.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        reads = CallState(loss_fn)
        self.modules: list[nn.Module] = list(reads.modules)
        self._reads_hold = _watch(reads)
        self._cells: list[types.CellType] = []
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._containers: list[Any] = []
        self._add_callable(loss_fn)
        self._objects = self._present()
        self._contents = [*map(_entries, self._containers)]
        parts = dict.fromkeys(part for root in self.modules for part in root.modules())
        stores = [[part._parameters, part._buffers] for part in parts]  # noqa: SLF001
        self._networks = Entries(store for pair in stores for store in pair)
        self._tensors = [
            tensor
            for tensor in self._networks.values
            if tensor is not None and tensor.layout == torch.strided
        ]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]

    def hold(self) -> bool:
        """Whether everything is as it was.

        Cost: 0.1 us for each tensor, value, name and entry.
        """
        if not all(map(is_, self._present(), self._objects)):
            return False
        for container, before in zip(self._containers, self._contents, strict=True):
            if len(container) != len(before) or not all(map(is_, _entries(container), before)):
                return False
        if not self._networks.hold():
            return False
        return [*map(Tensor.data_ptr, self._tensors)] == self._addresses and self._reads_hold()

    def _present(self) -> list[Any]:
        cells = [_contents(cell) for cell in self._cells]
        return [*cells, *map(dict.get, self._owners, self._names)]

    def _add_callable(self, function: Any) -> None:
        """The names in the code of a function, and the attributes of the object that it belongs to."""
        if isinstance(function, functools.partial):
            for part in (function.func, *function.args, *function.keywords.values()):
                self._add_value(part, _DEPTH)
        elif isinstance(function, types.MethodType):
            self._add_attributes(function.__self__)
            self._add_callable(function.__func__)
        elif isinstance(function, types.FunctionType):
            for cell in function.__closure__ or ():
                self._cells.append(cell)
                self._add_value(_contents(cell), _DEPTH)
            for name in sorted(_names(function.__code__) & function.__globals__.keys()):
                self._add_name(function.__globals__, name)
        elif not isinstance(function, (nn.Module, type, types.BuiltinFunctionType)):
            self._add_attributes(function)

    def _add_attributes(self, owner: Any) -> None:
        if not isinstance(owner, (nn.Module, types.ModuleType)):  # modules are watched as such
            for name in getattr(owner, "__dict__", {}):
                self._add_name(vars(owner), name)

    def _add_name(self, owner: dict[str, Any], name: str) -> None:
        value = owner[name]
        if not isinstance(value, (bool, int, float, str, Tensor)):  # by equality or address
            self._owners.append(owner)
            self._names.append(name)
            self._add_value(value, _DEPTH)

    def _add_value(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, (list, tuple, dict)) and depth and len(value) <= MOST_ENTRIES:
            self._containers.append(value)
            for part in _entries(value):
                self._add_value(part, depth - 1)


def _watch(reads: CallState) -> Callable[[], bool]:
    tensors, values = reads.tensors(), reads.values()
    if all(tensor.layout == torch.strided for tensor in tensors):
        return reads.watch()

    def hold() -> bool:  # sparse tensors have no address
        now = reads.tensors()
        same = len(now) == len(tensors) and all(map(is_, now, tensors))
        return same and reads.values() == values

    return hold


def _entries(container: Any) -> tuple[Any, ...]:
    return tuple(container.values()) if isinstance(container, dict) else tuple(container)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY


def _names(code: types.CodeType) -> set[str]:
    """Names that the code, and functions written inside it, may read from outside."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*inner)
