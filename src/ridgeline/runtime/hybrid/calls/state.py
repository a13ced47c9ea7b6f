"""What a callable reads besides its inputs: tensors and plain Python values.

A captured or compiled program holds both as they were. Tensors it holds by reference, so that updates in
place are seen; parameters that were *replaced*, and Python values such as `training` or `self.scale`,
have to be watched. The values are found in the bytecode: those names that the code reads and never writes.
(What it writes itself, a counter say, is a matter for the equivalence check.)
"""

import contextlib
import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.runtime.random_state import HostGenerators

_PLAIN = (bool, int, float, str, types.NoneType)


class Places:
    """Places that a program reads: entries of dictionaries, and variables of closures."""

    def __init__(self) -> None:
        self.stores: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.cells: list[types.CellType] = []

    def add(self, store: dict[str, Any] | types.CellType, name: str) -> None:
        """Add `store[name]`, or the variable that is the cell."""
        if isinstance(store, types.CellType):
            self.cells.append(store)
        else:
            self.stores.append(store)
            self.names.append(name)

    def current(self) -> list[Any]:
        """What is there now; None where nothing is."""
        return [*map(dict.get, self.stores, self.names), *map(_contents, self.cells)]


class CallState:
    """The modules, tensors and Python values that a callable reads.

    Args:
        fn: A module, function, method, partial or callable object.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.modules: list[nn.Module] = []
        self.tensor_places = Places()
        self.value_places = Places()
        self._seen: set[int] = set()
        self._follow(fn)

    def tensors(self) -> list[Tensor]:
        """Every tensor once, as it is now."""
        found = self.tensor_places.current()
        return list({id(t): t for t in found if isinstance(t, Tensor)}.values())

    def values(self) -> tuple[Any, ...]:
        """The Python values as they are now."""
        return tuple(self.value_places.current())

    def addresses(self) -> list[int] | None:
        """Where the tensors' data lie now; None where one is gone."""
        try:
            return [*map(Tensor.data_ptr, self.tensor_places.current())]
        except TypeError:  # a parameter became None
            return None

    def watch(self) -> Callable[[], bool]:
        """A function that says whether tensors lie, and values are, as they are at this moment.

        Cost: 0.2 us a tensor and 0.1 us a value. It runs in every call, so everything that it does is
        done by loops of the interpreter's C code.
        """
        stores, names = self.tensor_places.stores, self.tensor_places.names
        value_stores, value_names = self.value_places.stores, self.value_places.names
        addresses, values = self.addresses(), list(self.values())
        address: Callable[[Any], int] = Tensor.data_ptr
        get = dict.get

        def is_unchanged() -> bool:
            try:
                return (
                    list(map(address, map(get, stores, names))) == addresses
                    and list(map(get, value_stores, value_names)) == values
                )
            except TypeError:  # a parameter became None
                return False

        def is_unchanged_with_closure() -> bool:
            return self.addresses() == addresses and self.value_places.current() == values

        has_cells = self.tensor_places.cells or self.value_places.cells
        return is_unchanged_with_closure if has_cells else is_unchanged

    def _follow(self, value: Any) -> None:
        """Note what a value that the program uses brings along."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._add_module(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._follow(part)
        elif isinstance(value, types.MethodType):
            self._follow(value.__self__)
            self._read_code(value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType):
            if not (value.__module__ or "").startswith("torch."):
                self._read_code(value, None)
        elif isinstance(value, (list, tuple)):
            for part in value:
                if isinstance(part, (nn.Module, Tensor)):
                    self._follow(part)
        elif callable(value) and not isinstance(value, type):
            self._read_code(type(value).__call__, value)

    def _add_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        for part in module.modules():
            for store in (part._parameters, part._buffers):  # noqa: SLF001 - read at C speed
                for name, tensor in store.items():
                    if tensor is not None and tensor.layout == torch.strided:
                        self.tensor_places.add(store, name)
            self._seen.add(id(part))
            self._read_code(type(part).forward, part)

    def _read_code(self, function: Any, owner: Any) -> None:
        """Watch what a function reads of its closure, its globals and the object it belongs to."""
        function = _unwrapped(function)
        if not isinstance(function, types.FunctionType):
            return
        reads, writes = _names(function.__code__)
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in sorted(reads - writes):
            if name in free:
                self._read(free[name], name, _contents(free[name]))
            elif name in function.__globals__:
                self._read(function.__globals__, name, function.__globals__[name])
        own: dict[str, Any] = getattr(owner, "__dict__", {})
        self._read_attributes(own, reads - writes, depth=2)
        for name in sorted(reads):
            method = getattr(type(owner), name, None) if owner is not None else None
            key = (id(owner), id(method))
            if isinstance(method, (types.FunctionType, property)) and hash(key) not in self._seen:
                self._seen.add(hash(key))
                self._read_code(method.fget if isinstance(method, property) else method, owner)

    def _read_attributes(self, own: dict[str, Any], names: frozenset[str], depth: int) -> None:
        """Plain attributes of an object, and of plain objects among them (a configuration, say)."""
        for name in sorted(names & own.keys()):
            value = own[name]
            if isinstance(value, _PLAIN):
                self.value_places.add(own, name)
            elif isinstance(value, Tensor):
                self.tensor_places.add(own, name)
            elif depth and not isinstance(value, (nn.Module, type, types.ModuleType)):
                self._read_attributes(getattr(value, "__dict__", {}), names, depth - 1)

    def _read(self, store: dict[str, Any] | types.CellType, name: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self.value_places.add(store, name)
        elif isinstance(value, Tensor):
            self.tensor_places.add(store, name)
        elif not isinstance(value, types.ModuleType):
            self._follow(value)


class SavedState:
    """Tensors and random state as they are now, to be put back bitwise.

    Cost: Doubles the memory of the tensors as long as it lives.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        # An expanded tensor shares memory between its elements, so nobody writes it: nothing to save.
        self.tensors = [tensor for tensor in tensors if not _overlaps(tensor)]
        self._copies = [tensor.detach().clone() for tensor in self.tensors]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._host = HostGenerators.now()

    def restore_tensors(self) -> None:
        """Write the saved values into the tensors, in place."""
        with torch.no_grad():
            for tensor, saved in zip(self.tensors, self._copies, strict=True):
                tensor.copy_(saved)

    def restore(self) -> None:
        """Put tensors and random state back."""
        self.restore_tensors()
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        self._host.restore()


def _overlaps(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in pairs)


@contextlib.contextmanager
def preserved(tensors: list[Tensor]) -> Iterator[SavedState]:
    """Whatever happens inside, tensors and random state are afterwards as they were."""
    saved = SavedState(tensors)
    try:
        yield saved
    finally:
        saved.restore()


def _unwrapped(function: Any) -> Any:
    """The function under decorators that keep `__wrapped__`."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


@functools.cache
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names other than local ones that the code, and functions written inside it, read and write."""
    reads: set[str] = set()
    writes: set[str] = set()
    for instruction in dis.get_instructions(code):
        operation, value = instruction.opname, instruction.argval
        if isinstance(value, types.CodeType):
            inner_reads, inner_writes = _names(value)
            reads |= inner_reads
            writes |= inner_writes
        elif isinstance(value, str) and "FAST" not in operation and operation != "LOAD_CONST":
            if operation.startswith("STORE_"):
                writes.add(value)
            elif operation.startswith("LOAD_"):
                reads.add(value)
    return frozenset(reads), frozenset(writes)


def _contents(cell: types.CellType) -> Any:
    """What a closure's variable holds; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
