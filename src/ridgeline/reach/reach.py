"""What a step can get at: the objects, containers, closures and globals of its model, loss and optimizer.

A step is a user's Python: it counts calls, fills caches, appends to lists. This finds the places where it may
do so, by following references from what the step is given: attributes, elements, closure cells, and of the
user's own functions the globals that their code names. What belongs to a library or to the system (modules,
threads, files, process groups) is left alone.
"""

import array
import collections
import contextlib
import copy
import ctypes
import functools
import inspect
import io
import os
import random
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from ridgeline.reach.owners import is_open, is_users, is_users_class

CONTAINERS = (dict, list, set, collections.deque)
"""Containers that can be changed."""
_ORDERED = (collections.OrderedDict,)
_OF_C = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData, ctypes._Pointer)  # noqa: SLF001
BUFFERS = (array.array, bytearray, *_OF_C)
"""Arrays of Python's, of numbers and of bytes, and what is laid out as C has it."""
GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
"""Sources of random numbers that a user may own."""

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, types.CodeType, torch.dtype, torch.device,
    types.BuiltinFunctionType, range, slice, Path,
)  # fmt: skip
_SYSTEM = (
    threading.Thread, type(threading.Lock()), type(threading.RLock()), threading.Event,
    threading.Condition, io.IOBase, socket.socket, subprocess.Popen,
)  # fmt: skip
_SCREENS = (sys.stdout, sys.stderr, sys.stdin, sys.__stdout__, sys.__stderr__, sys.__stdin__)
_AROUND = (functools.cached_property, functools.partialmethod, functools.singledispatchmethod)
_WRITER = ("flush", "close")
"""Methods of what writes somewhere: logs of metrics, files of other formats."""
_HOOKS_OF_MANY = torch.autograd.graph.__file__
"""Where the code of hooks lies that call another one once the gradients of several tensors are there."""


class Cell:
    """A variable: of a closure, of a module, of a class or in a slot; `owner` and `name` say where.

    `label` is what the user calls it.
    """

    def __init__(self, owner: Any, name: str, label: str) -> None:
        self.owner = owner
        self.name = name
        self.label = label


class Reach:
    """Everything that can be reached from some objects.

    Attributes:
        stores: Containers, and the `__dict__` of objects.
        attributes: The `__dict__` of objects that hold part of the system, which are looked into only.
        cells: Variables that code names.
        tensors: Each once.
        lazy: Parameters and buffers without a shape yet.
        arrays: NumPy's.
        buffers: Python's own arrays of numbers and of bytes; without pointers.
        generators: Sources of random numbers.
        streams: Iterators and open files, and pointers, to what nobody can tell.
        modules: Each once, with those inside others.
        classes: Those of the user's own.
        functions: Those of the user's own that variables and containers hold.
        seen: All objects but atoms by their numbers, held so that no number is used again.
    """

    def __init__(self, *roots: Any) -> None:
        self.stores: list[Any] = []
        self.attributes: list[dict[str, Any]] = []
        self.cells: list[Cell] = []
        self.tensors: list[Tensor] = []
        self.lazy: list[Tensor] = []
        self.arrays: list[numpy.ndarray[Any, Any]] = []
        self.buffers: list[Any] = []
        self.generators: list[Any] = []
        self.streams: list[Any] = []
        self.modules: list[nn.Module] = []
        self.classes: list[type] = []
        self.functions: list[types.FunctionType] = []
        self._methods: set[int] = set()
        self.seen: dict[int, Any] = {}
        self._named: set[tuple[int, str]] = set()
        self._open = [*roots]
        for root in roots:
            if isinstance(root, types.FunctionType):
                self._add_function(root)
        # A list and no recursion: models nest deeper than Python's stack of calls.
        while self._open:
            self._visit(self._open.pop())

    def networks(self) -> list[nn.Module]:
        """The modules that are not inside others."""
        inside = {id(p) for module in self.modules for p in module.modules() if p is not module}
        return [module for module in self.modules if id(module) not in inside]

    def _visit(self, value: Any) -> None:
        if isinstance(value, _ATOMS) or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, numpy.ndarray):
            self.arrays.append(value)
            self._add_derived(value)
        elif isinstance(value, BUFFERS):
            (self.streams if _has_pointers(value) else self.buffers).append(value)
        elif isinstance(value, memoryview):
            with contextlib.suppress(ValueError):  # of one that was released
                self._open.append(value.obj)
        elif isinstance(value, GENERATORS):
            self.generators.append(value)
            self._add_derived(value)
        elif isinstance(value, CONTAINERS):
            self.stores.append(value)
            self._add_elements(value)
            self._add_derived(value)
        elif isinstance(value, (tuple, frozenset)):
            self._open += contents_of(value)
            self._add_derived(value)
        elif isinstance(value, functools.partial):
            self._open += (value.func, value.args, value.keywords)
        elif isinstance(value, types.MethodType):
            self._open += (value.__self__, value.__func__)
        elif isinstance(value, types.FunctionType):
            if is_users(value.__code__.co_filename):
                self._add_function(value)
            else:  # a library's, put around one of the user's by `torch.no_grad` or `contextmanager`
                self._open.append(vars(value).get("__wrapped__"))
        elif isinstance(value, type):
            self._add_class(value)
        elif _is_stream(value):
            self.streams.append(value)
        elif not (isinstance(value, types.ModuleType) or _is_system(value)):
            self._add_object(value)

    def _add_elements(self, container: Any) -> None:
        contents = contents_of(container)
        self._open += [element for element in contents if not isinstance(element, _ATOMS)]

    def _add_derived(self, container: Any) -> None:
        """Attributes beside the elements, which a container of the user's own class may have."""
        if type(container).__module__ not in ("builtins", "collections", "numpy"):
            self._add_object(container)

    def _add_tensor(self, tensor: Tensor) -> None:
        if is_lazy(tensor):  # it changes its class with its first use
            self.lazy.append(tensor)
            return
        if tensor.is_nested:  # it has no shape; what it holds has
            tensor = tensor.values()
        self.tensors.append(tensor)
        has_own_gradient = is_leaf(tensor)
        # Only of leaves: asking another tensor for its gradient is a warning.
        if has_own_gradient and tensor.grad is not None:
            self._open.append(tensor.grad)
        # Also one in which nothing is yet: `parameter.calls = 1` is put there.
        self._open.append(getattr(tensor, "__dict__", None))
        if has_own_gradient and tensor.requires_grad:
            self._open += _hooks(tensor)

    def _add_object(self, value: Any) -> None:
        """Attributes of an object, and of its class where that is the user's."""
        kind = type(value)
        if isinstance(value, nn.Module):
            self.modules.append(value)
        self._open.append(inspect.getattr_static(value, "__wrapped__", None))
        if not is_open(kind):
            return
        self._open += kind.__mro__[:-1]
        own = vars(value) if hasattr(value, "__dict__") else {}
        if isinstance(own, dict):
            # Not put back as a whole: a lock or a process that is new in it by then must not be lost.
            if any(_is_system(part) for part in own.values()):
                self.attributes.append(own)
                self._add_elements(own)
            else:
                self._open.append(own)
        if isinstance(value, nn.Module):  # scripted ones keep them elsewhere
            # Not by its methods, which a model may have written anew, to be called as its own code does.
            for held in (value._parameters, value._buffers):  # noqa: SLF001 - what torch's methods read
                self._open += [tensor for tensor in held.values() if tensor is not None]
        if isinstance(value, LazyModuleMixin):
            self._add_cell(value, "__class__", None)
        for name in slots_of(kind):
            self._add_cell(value, name, getattr(value, name, None))

    def _add_function(self, function: types.FunctionType) -> None:
        self.seen[id(function)] = function
        if id(function) not in self._methods:
            self.functions.append(function)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            # A loss may name what is assigned later, such as the step that it is given to.
            for content in contents([cell]):
                self._add_cell(cell, "cell_contents", content, label=name)
        self._open += (function.__defaults__, function.__kwdefaults__, vars(function))
        names = _global_names(function.__code__)
        for name in names:
            found = function.__globals__.get(name)
            if isinstance(found, types.ModuleType):
                self._add_module(found, names)
            else:
                self._add_cell(function.__globals__, name, found)
        for name in names & sys.modules.keys():  # it may import them itself
            self._add_module(sys.modules[name], names)

    def _add_module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """Of a user's module what the code names; of Python's, the environment."""
        if module is os and "environ" in names:
            self._open.append(os.environ)
        if is_users(getattr(module, "__file__", None) or ""):
            for name in names & vars(module).keys():
                self._add_cell(vars(module), name, vars(module)[name])

    def _add_class(self, kind: type) -> None:
        if not is_users_class(kind):
            return
        self.classes.append(kind)
        self._open.append(type(kind))
        for name, value in [*vars(kind).items()]:
            if not (name.startswith("__") and isinstance(value, (*_ATOMS, dict, list, tuple))):
                function = underlying(value)
                if isinstance(function, types.FunctionType):
                    self._methods.add(id(function))
                    self._open.append(function)
                # Descriptors compute what they give; asking for it could run the user's code.
                elif not hasattr(function, "__get__"):
                    self._add_cell(kind, name, value)

    def _add_cell(self, owner: Any, name: str, value: Any, *, label: str = "") -> None:
        if (id(owner), name) not in self._named:
            self._named.add((id(owner), name))
            self.cells.append(Cell(owner, name, label or name))
            self._open.append(value)


def kind_of(container: Any) -> Any:
    """The class of Python's own that it is, or is derived from, whose methods do nothing else."""
    return next(k for k in (*_ORDERED, *CONTAINERS, tuple, frozenset) if isinstance(container, k))


def contents_of(container: Any) -> list[Any]:
    """The elements; of a dictionary all keys, then all values in their order.

    As the kind of container has them: a class derived from it may give others, or refuse (`Irreps` of e3nn is
    a tuple without a length).
    """
    kind = kind_of(container)
    contents = [*kind.__iter__(container)]
    if isinstance(
        container, _ORDERED
    ):  # to `dict.values` its values are in another order than its keys
        return [*contents, *(dict.__getitem__(container, key) for key in contents)]
    return [*contents, *dict.values(container)] if isinstance(container, dict) else contents


def node_of(tensor: Tensor) -> Any:
    """The node of autograd that computed a tensor (`grad_fn`); None where none did.

    One of several views (`weight.chunk(2)`) whose memory was written since has none in torch, but an error.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor was computed from none that requires a gradient; see `node_of`."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _hooks(leaf: Tensor) -> list[Any]:
    """What its gradient is given to; what the user's part of torch's own hooks is lies in their closures."""
    found: list[Any] = []
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        for hook in (getattr(leaf, name, None) or {}).values():
            found.append(hook)
            # `register_multi_grad_hook` registers functions of torch around the user's, under its name.
            code = getattr(hook, "__code__", None)
            if code is not None and code.co_filename == _HOOKS_OF_MANY:
                found += filter(callable, contents(getattr(hook, "__closure__", None) or ()))
    return found


def contents(cells: Iterable[types.CellType]) -> list[Any]:
    """What the cells of a closure hold; those of names that are not assigned yet hold nothing."""
    found = []
    for cell in cells:
        # Python has no other question: an empty cell raises where any other object has an attribute or not.
        with contextlib.suppress(ValueError):
            found.append(cell.cell_contents)
    return found


def underlying(value: Any) -> Any:
    """The function of a property, a static, class or bound method and the like; anything else itself."""
    value = value.fget if isinstance(value, property) else value
    return value.func if isinstance(value, _AROUND) else getattr(value, "__func__", value)


def methods_of(kind: type) -> list[tuple[str, Any]]:
    """Names and functions of what a class defines, properties included."""
    found = [(name, underlying(value)) for name, value in vars(kind).items()]
    return [
        pair for pair in found if isinstance(getattr(pair[1], "__code__", None), types.CodeType)
    ]


def names_in(code: types.CodeType) -> frozenset[str]:
    """Names and texts in code and in functions written inside of it: attributes, globals, keys."""
    inner = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    texts = (part for part in code.co_consts if isinstance(part, str))
    return frozenset((*code.co_names, *code.co_freevars, *texts)).union(*inner)


def _has_pointers(value: Any) -> bool:
    """Whether it is of C and holds pointers, of which `ctypes` makes no copy."""
    try:
        return isinstance(value, _OF_C) and copy.copy(value) is None
    except ValueError:
        return True


def _is_stream(value: Any) -> bool:
    """Whether it is an open file, or an iterator whose place cannot be put back."""
    kind = type(value)
    if isinstance(value, io.IOBase):
        return not value.closed and all(value is not screen for screen in _SCREENS)
    is_closed = kind.__module__ == "builtins" or not is_open(kind)  # it is not looked into
    return is_closed and (isinstance(value, Iterator) or all(hasattr(kind, n) for n in _WRITER))


def _is_system(value: Any) -> bool:
    """Whether it has a side outside of Python's memory: what holds such is looked into, and not put back."""
    if isinstance(value, _SYSTEM):
        return True
    home = type(value).__module__
    return home.startswith(("torch._C", "torch.distributed.")) and not isinstance(
        value, (Tensor, nn.Module, torch.Generator)
    )


@cache
def _global_names(code: types.CodeType) -> frozenset[str]:
    """The names that code, and functions written inside it, may look up outside of it."""
    inner = [_global_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    """Names of the variables that a user's class keeps in slots."""
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        if not base.__module__.startswith("torch"):
            names = [slots] if isinstance(slots, str) else slots
            # Python puts the class before names that begin with two underscores.
            mangled = f"_{base.__name__.lstrip('_')}"
            found += [mangled + n if n.startswith("__") else n for n in names if n[-2:] != "__"]
    return tuple(found)
