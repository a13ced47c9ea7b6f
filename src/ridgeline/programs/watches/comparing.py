"""Comparisons of ours among the guards of torch's compiler: by an object, or by its name from the root.

And that it need not time its guards.
"""

import math
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo import guards
from torch._dynamo.guards import _get_closure_vars
from torch._guards import Guard

UNKNOWN = object()
"""What a guard is about where that is no object of the program's."""
MISSING = (LookupError, AttributeError, TypeError)
"""What looking something up by its name raises where that is there no longer."""

_compiler: Any = guards
_time_guards = _compiler.profile_guard_manager


def leave_untimed() -> None:
    """Have torch's compiler not time the guards that it builds next, which it does for its log alone.

    It empties all caches of the processor before: 25 ms of each piece, where reading a small one takes 50,
    and other processes wait for their memory. What others compile in this process is timed as ever.
    """
    _compiler.profile_guard_manager = _untimed


def _untimed(*_: Any) -> float:
    _compiler.profile_guard_manager = _time_guards
    return 0.0


def compare(manager: Any, look: Callable[[Any], Any], value: Any, what: str) -> None:
    """Before every call, see whether `look` finds what it finds in the value of now."""
    held = look(value)

    def is_same(now: Any) -> bool:
        return bool(look(now) == held)

    manager.add_lambda_guard(is_same, [f"{what} changed"], None)


def compare_by_name(builder: Any, name: str, look: Callable[[Any], Any], what: str) -> None:
    """The same from the root, by the name of what the guard is about."""
    find = of_name(builder, name)
    held = look(find(builder.scope["L"]))

    def is_same(now: Any) -> bool:
        try:  # what the compiler compares of the way to it is compared later
            return bool(look(find(now)) == held)
        except MISSING:
            return False

    builder.guard_manager.root.add_lambda_guard(is_same, [f"{what}{name} changed"], None)


def of_name(builder: Any, name: str) -> Callable[[Any], Any]:
    """A function of the local variables that gives what a name of the compiler's stands for."""
    code, names = compile(name, "<guard>", "eval"), names_beside(builder.scope["G"])
    return lambda now: eval(code, names, {"L": now})


def names_beside(variables: dict[str, Any]) -> dict[str, Any]:
    """What the compiler's names of objects are made of beside local variables: globals, and its functions."""
    return {"G": variables, **_get_closure_vars()}


def value_of(builder: Any, guard: Guard) -> Any:
    """What a guard is about; something unknown where that is no object of the program's."""
    try:
        return builder.get(guard)
    except (NameError, LookupError, AttributeError, TypeError, NotImplementedError):
        return UNKNOWN


def resolved(output: Any, source: Any) -> Any:
    """What a source of a program gives; something unknown where that is no object of the program's."""
    name = (
        source.name if isinstance(source.name, str) else source.name()
    )  # a method before torch 2.12
    try:
        return eval(name, names_beside(output.global_scope), {"L": output.local_scope})
    except (NameError, *MISSING, NotImplementedError):
        return UNKNOWN


def content_of(value: Any) -> Any:
    """What a nest of containers holds: plain values with their types, objects by identity."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(content_of, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(content_of, value))
    if isinstance(value, dict):
        return dict, tuple((key, content_of(part)) for key, part in value.items())
    if isinstance(value, float):
        return float, value, math.copysign(1.0, value)
    if isinstance(value, complex):
        return complex, content_of(value.real), content_of(value.imag)
    if isinstance(value, (int, str, bytes, types.NoneType)):
        return type(value), value
    return id(value)
