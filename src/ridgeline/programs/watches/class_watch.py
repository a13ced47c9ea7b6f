"""Sees what torch's compiler takes for granted: methods of classes, and which attributes functions have."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from ridgeline.programs.watches.classes import CALLS_OF_MODULES
from ridgeline.programs.watches.conditions import Conditions
from ridgeline.reach.owners import is_users_class
from ridgeline.reach.reach import Reach

_METHODS = (types.FunctionType, property, staticmethod, classmethod)


class ClassWatch:
    """Methods and bases of the classes that a step can get at, and the names of its functions' attributes.

    Args:
        roots: Model and loss function.

    Cost: A walk through what they hold when made, and once after each change; a look takes 0.03 us a method.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._holds = self._conditions()

    def forget_stale_programs(self) -> None:
        """Have torch's compiler begin again if a method or such a name is new, gone or another.

        Cost: Then all programs of this process are compiled again.
        """
        if not self._holds({}):
            self._holds = self._conditions()
            torch.compiler.reset()

    def _conditions(self) -> Callable[[dict[str, Any]], bool]:
        conditions = Conditions({"__builtins__": {"len": len}})
        reach = Reach(*self._roots)
        for function in reach.functions:
            names = conditions.constant(vars(function).keys())
            conditions.require(f"{names} == {conditions.constant(frozenset(vars(function)))}")
        kinds = {*map(type, reach.seen.values())}
        # Descriptors are looked into by nobody, since they compute what they give.
        kinds.update(type(value) for kind in reach.classes for value in vars(kind).values())
        held = {base for kind in kinds for base in kind.__mro__}
        for kind in dict.fromkeys((*reach.classes, *filter(is_users_class, held))):
            # Another order where it was given other bases.
            conditions.require(
                f"{conditions.constant(kind)}.__mro__ is {conditions.constant(kind.__mro__)}"
            )
            own = conditions.constant(vars(kind))
            # A method that is new has no comparison of its own.
            conditions.require(f"len({own}) == {len(vars(kind))}")
            for name, value in vars(kind).items():
                if isinstance(value, _METHODS):
                    conditions.require(f"{own}.get({name!r}) is {conditions.constant(value)}")
        for kind in {*map(type, reach.modules)}:
            # Layers of libraries are patched where they are defined; the compiler trusts those of torch.
            if isinstance(inspect.getattr_static(kind, "forward", None), types.FunctionType):
                own = conditions.constant(kind)
                for name in ("forward", *CALLS_OF_MODULES):
                    held = conditions.constant(getattr(kind, name))
                    conditions.require(f"{own}.{name} is {held}")
        return conditions.all_hold()
