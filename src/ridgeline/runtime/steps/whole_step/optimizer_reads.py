"""What the code of an optimizer that is not torch's reads beside its groups and its state.

Torch's own read nothing else. Others have settings in attributes, of their own, of their class and of
parameters, and name variables of modules: to the program of a step, these are constants.
"""

import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.optimizers.groups import parameters_of
from ridgeline.reach.owners import is_users
from ridgeline.reach.reach import CONTAINERS, contents, contents_of, methods_of, names_in
from ridgeline.reach.step_code import is_torchs

_COMPARED_ELSEWHERE = frozenset({"state", "param_groups", "step", "zero_grad"})
_CALLED = ("step", "zero_grad")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, numpy.generic)
_WHOLE = (Tensor, nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)
"""What is one thing here, and not its parts: its own guards compare those."""
_MOST_DEPTH = 4
_MOST_PARTS = 1000
"""Of what lies deeper, or has more parts (a data set), only the identity is compared."""
_MISSING = object()

_Place = tuple[str, Any, str]
"""What to call a variable, and where it is: a dictionary or a cell, and a name."""


class OptimizerReads:
    """The values that an optimizer's own code names, as they are now, and whether they still are.

    Args:
        optimizer: One whose classes are all torch's has none.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._shared = {id(group) for group in optimizer.param_groups} | {id(optimizer.state)}
        self._places = [*_places(optimizer)]
        self._kept = [_load(place) for place in self._places]  # so that no identity is used again
        self._before = self._portraits()

    def changed(self) -> str | None:
        """What is another now, in words; None while nothing is.

        Cost: Nothing for torch's optimizers; for others about 0.3 us for each name in their code.
        """
        now = self._portraits()
        if now == self._before:
            return None
        pairs = zip(self._places, self._before, now, strict=True)
        return next(f"{what} changed" for (what, _, _), old, new in pairs if old != new)

    def _portraits(self) -> list[Any]:
        return [self._portrait(_load(place), _MOST_DEPTH) for place in self._places]

    def _portrait(self, value: Any, depth: int) -> Any:
        """Equal to a later one where nothing has changed: plain values, and the identity of all else."""
        if isinstance(value, _PLAIN):
            return (type(value), value)
        if id(value) in self._shared or isinstance(value, _WHOLE) or depth == 0:
            return id(value)
        if isinstance(value, numpy.ndarray):
            return (id(value), value.tobytes() if value.size <= _MOST_PARTS else b"")
        parts = _parts(value)
        if len(parts) > _MOST_PARTS:
            return (id(value), len(parts))
        return (id(value), *(self._portrait(part, depth - 1) for part in parts))


def _parts(value: Any) -> list[Any]:
    """The elements of a container; the attributes of another object, those of an optimizer among them."""
    if isinstance(value, (*CONTAINERS, tuple, frozenset)):
        return contents_of(value)
    own = getattr(value, "__dict__", None)
    return contents_of(own) if isinstance(own, dict) else []


def _load(place: _Place) -> Any:
    _, owner, name = place
    if isinstance(owner, types.CellType):
        return next(iter(contents([owner])), _MISSING)
    return owner.get(name, _MISSING)


def _places(optimizer: Optimizer) -> Iterator[_Place]:
    """The variables that its steps name in code of classes that are not torch's."""
    kinds = [k for k in type(optimizer).__mro__ if not is_torchs(k.__module__) and k is not object]
    methods = [pair for kind in kinds for pair in methods_of(kind)]
    functions = [function for name, function in methods if name in _CALLED]
    named, seen = set[str](), set[types.CodeType]()
    while functions:
        function = inspect.unwrap(functions.pop())  # from what `torch.no_grad` puts around it
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        names = sorted(names_in(code))
        named.update(names)
        found = [*_outside(function, names)]
        yield from found
        values = map(_load, found)
        functions += [
            v for v in values if inspect.isfunction(v) and is_users(v.__code__.co_filename)
        ]
        functions += [method for name, method in methods if name in names]
    for name in sorted(named - _COMPARED_ELSEWHERE):
        stores = [vars(optimizer), *(vars(kind) for kind in kinds if name in vars(kind))]
        yield from ((f"the optimizer's {name}", store, name) for store in stores)
    for own in map(vars, parameters_of(optimizer)):
        yield from ((f"{name} of a parameter", own, name) for name in sorted(named & own.keys()))


def _outside(function: types.FunctionType, names: list[str]) -> Iterator[_Place]:
    """The variables of its closure and of modules that a function names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((_said(name), cell, name) for name, cell in cells)
    for store in _stores(function.__globals__, names):
        yield from ((_said(name), store, name) for name in names if name in store)


def _stores(variables: dict[str, Any], names: list[str]) -> Iterator[dict[str, Any]]:
    """The variables of the code's module, and of the user's other modules that it names."""
    yield variables
    for value in (variables.get(name) for name in names):
        if isinstance(value, types.ModuleType) and is_users(getattr(value, "__file__", None) or ""):
            yield vars(value)


def _said(name: str) -> str:
    return f"{name}, which the optimizer's code names,"
