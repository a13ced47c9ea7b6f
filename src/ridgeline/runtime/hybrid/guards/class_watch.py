"""Notices another method in a class of the user's, which torch's compiler takes for granted."""

import types
from collections.abc import Callable
from typing import Any

from ridgeline.reach.reach import Reach
from ridgeline.runtime.hybrid.guards.conditions import Conditions

_METHODS = (types.FunctionType, property, staticmethod, classmethod)


class ClassWatch:
    """The methods of the classes that a step can get at.

    Args:
        roots: Model and loss function.

    Cost: A walk through what they hold when made, and once after each change; a look takes 0.03 us a method.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._holds = self._conditions()

    def has_changed(self) -> bool:
        """Whether a method is another than at the last look, or a class has one more or one less."""
        if self._holds({}):
            return False
        self._holds = self._conditions()
        return True

    def _conditions(self) -> Callable[[dict[str, Any]], bool]:
        conditions = Conditions({"__builtins__": {"len": len}})
        for kind in Reach(*self._roots).classes:
            own = conditions.constant(vars(kind))
            conditions.require(f"len({own}) == {len(vars(kind))}")
            for name, value in vars(kind).items():
                if isinstance(value, _METHODS):
                    conditions.require(f"{own}.get({name!r}) is {conditions.constant(value)}")
        return conditions.all_hold()
