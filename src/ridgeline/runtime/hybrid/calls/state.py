"""What a callable reads besides its inputs: tensors, modules, hooks and plain Python values.

A captured or compiled program holds all of them as they were. Tensors it holds by reference, so that updates
in place are seen; what was *replaced*, and Python values such as `training` or `self.scale`, have to be
watched. They are found in the bytecode: those names that the code reads and never writes, and what lies in
lists and dictionaries under these names. (What it writes itself, a counter say, is a matter for the
equivalence check.)
"""

import collections
import contextlib
import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from ridgeline.errors import CaptureError
from ridgeline.runtime.hybrid.calls.watching import Watched, is_plain

MOST_ELEMENTS = 512
"""Elements of lists and dictionaries that are watched for one callable; each takes 0.05 us of every call."""

_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps its hooks."""
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class CallState(Watched):
    """The modules, tensors, hooks and Python values that a callable reads.

    Args:
        fn: A module, function, method, partial or callable object.

    Attributes:
        modules: The networks among what it reads; those inside them are not listed.
        notes: What is not watched, and why.

    Raises:
        CaptureError: a module's parameters have no shapes yet.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.modules: list[nn.Module] = []
        self.notes: list[str] = []
        self._num_elements = 0
        self._seen: set[int] = set()
        self._parts: set[int] = set()
        self._enter(fn, "it", frozenset(), depth=2)

    def _enter(self, value: Any, name: str, names: frozenset[str], depth: int) -> None:
        """Watch what an object brings along that the program reads under `name`; `names` are read of it."""
        if id(value) not in self._seen:
            self._seen.add(id(value))
            if isinstance(value, nn.Module):
                self._add_module(value)
            elif isinstance(value, functools.partial):
                for part in (value.func, value.args, value.keywords):
                    self._enter(part, name, names, depth)
            elif isinstance(value, types.MethodType):
                self._enter(value.__self__, name, names, depth)
                self._read_code(value.__func__, value.__self__)
            elif isinstance(value, types.FunctionType):
                if not _is_torchs(value):
                    self._read_code(value, None)
            elif isinstance(value, _CONTAINERS):
                self._add_container(value, name, names, depth)
            elif callable(value):
                self._read_code(type(value).__call__, value)
        if depth and not isinstance(value, (nn.Module, *_CONTAINERS)):
            self._read_attributes(getattr(value, "__dict__", {}), names, depth - 1)

    def _add_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        hooks = [vars(torch_module)[name] for name in _GLOBAL_HOOKS] if not self._parts else []
        for part in module.modules():
            if id(part) in self._parts:
                continue
            self._parts.add(id(part))
            self._seen.add(id(part))
            for store in (part._parameters, part._buffers):  # noqa: SLF001 - read at C speed
                self._add_tensors(store, type(part).__name__)
            hooks += [part._modules, *(vars(part)[name] for name in MODULE_HOOKS)]  # noqa: SLF001
            # Of a scripted module it is a descriptor that no class can be asked for.
            self._read_code(inspect.getattr_static(type(part), "forward"), part)
        self.empty += [store for store in hooks if not store]
        self.containers += [store.values() for store in hooks if store]

    def _add_tensors(self, store: dict[str, Any], owner: str) -> None:
        """The parameters, or the buffers, of one module."""
        for name, tensor in store.items():
            if tensor is not None and is_lazy(tensor):
                raise CaptureError(
                    f"wanted a model whose parameters have their shapes, got {name!r} of a {owner} that has "
                    "none yet; call the model once with an example before"
                )
        if not store:
            self.empty.append(store)
        elif all(map(_is_strided, store.values())):
            self.tensor_views.append(store.values())
        else:
            self.containers.append(store.values())
            self.held += [tensor for tensor in store.values() if _is_strided(tensor)]

    def _add_container(self, value: Any, name: str, names: frozenset[str], depth: int) -> None:
        """What a list, dictionary or the like contains, as far as it may be watched."""
        parts: list[Any] = list(value.values() if isinstance(value, dict) else value)
        modules = [part for part in parts if isinstance(part, nn.Module)]
        num_others = len(parts) - len(modules)
        if num_others + self._num_elements > MOST_ELEMENTS:
            self.notes.append(
                f"changes inside {name!r}, a {type(value).__name__} of {len(parts)} elements, are not "
                f"noticed: {MOST_ELEMENTS} elements are watched; replace it as a whole, or hybridize again"
            )
            parts = modules
        else:
            self._num_elements += num_others
            if not isinstance(value, (tuple, frozenset)):
                self.containers.append(value)
            if isinstance(value, dict):
                self.containers.append(dict.values(value))
        for part in parts:
            if _is_strided(part):
                self.held.append(part)
            elif not (is_plain(part) or isinstance(part, (Tensor, type, types.ModuleType))):
                self._enter(part, name, names, depth)

    def _read_code(self, function: Any, owner: Any) -> None:
        """Watch what a function reads of its closure, its globals and the object it belongs to."""
        function = _unwrapped(function)
        if not isinstance(function, types.FunctionType):
            return
        reads, writes = _names(function.__code__)
        only_read = reads - writes
        if not _is_torchs(function):
            self._read_defaults(function)
        free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name in sorted(only_read):
            if name in free:
                with contextlib.suppress(ValueError):  # not assigned yet, so nothing was read
                    self._read(free[name], name, free[name].cell_contents, only_read, depth=2)
            elif name in function.__globals__ and not _is_torchs(function):
                self._read(
                    function.__globals__, name, function.__globals__[name], only_read, depth=2
                )
        if owner is None:
            return
        own: dict[str, Any] = getattr(owner, "__dict__", {})
        if _is_torchs(type(owner)):  # what torch keeps for itself follows from what people can set
            only_read = frozenset(name for name in only_read if not name.startswith("_"))
        self._read_attributes(own, only_read, depth=2)
        for name in sorted(reads):
            found = getattr(type(owner), name, None)
            if (
                name in only_read
                and name not in own
                and isinstance(own, dict)
                and _is_default(found)
            ):
                self.places.add(
                    own, name
                )  # an attribute of the class, until the object has its own
            key = (id(owner), id(found))
            if isinstance(found, (types.FunctionType, property)) and hash(key) not in self._seen:
                self._seen.add(hash(key))
                self._read_code(found.fget if isinstance(found, property) else found, owner)

    def _read_defaults(self, function: types.FunctionType) -> None:
        """Networks and functions among the defaults of arguments, read where no caller gives any."""
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(default, (nn.Module, types.FunctionType)):
                self._enter(default, function.__name__, frozenset(), depth=0)

    def _read_attributes(self, own: dict[str, Any], names: frozenset[str], depth: int) -> None:
        """Attributes of an object, and of plain objects among them (a configuration, say)."""
        if not isinstance(own, dict):  # a class, of which nothing is watched
            return
        for name in sorted(names & own.keys()):
            self._read(own, name, own[name], names, depth)

    def _read(
        self,
        store: dict[str, Any] | types.CellType,
        name: str,
        value: Any,
        names: frozenset[str],
        depth: int,
    ) -> None:
        """Watch a place, and what the object there brings along."""
        if isinstance(value, Tensor):
            (self.tensor_places if _is_strided(value) else self.places).add(store, name)
        elif not isinstance(value, (types.ModuleType, type)):
            self.places.add(store, name)
            if not is_plain(value):
                self._enter(value, name, names, depth)


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


def _is_strided(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor with one address."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def _is_torchs(definition: Any) -> bool:
    """Whether a function or class is torch's own."""
    return (getattr(definition, "__module__", None) or "").startswith("torch.")


def _is_default(value: Any) -> bool:
    """Whether a class attribute is a plain value that an object may override; None is what is not there."""
    return value is not None and is_plain(value)
