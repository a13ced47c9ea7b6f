"""Which attributes objects hold themselves, and which keys dictionaries have, compared by one function.

Code that looks in `vars(x)`, or catches an `AttributeError` or a `KeyError`, depends on what is missing,
which torch's compiler does not compare. Whatever such code reads is looked at in every call: of a language
model of six layers 900 objects, since each module has five dictionaries of hooks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch._C._dynamo.guards import DictGuardManager
from torch._guards import Guard

from ridgeline.programs.watches.comparing import MISSING, names_beside, of_name, value_of
from ridgeline.programs.watches.conditions import Conditions
from ridgeline.programs.watches.settings import CLASS_NOTES

_STORES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps attributes of its own."""
_PLAIN = (dict, OrderedDict)
"""Dictionaries that give their keys as Python's do."""


class _Held(NamedTuple):
    """What an object holds."""

    name: str
    """Of the object, as the compiler gets at it."""
    what: str
    """In words."""
    look: Callable[[Any], frozenset[Any]]
    """What gives the names of it now."""
    names: frozenset[Any]


def require_held_names(
    guards: Sequence[Guard],
    is_object: Callable[[Any], bool],
    builder: Any,
    _: Guard,
    *,
    with_keys: bool,
) -> None:
    """A `Guard` on the names of what objects hold themselves.

    Args:
        guards: On the objects that a piece reads.
        is_object: Says of what attributes are compared.
        builder: Of the compiler's guards.
        with_keys: Whether keys of dictionaries are, where the compiler compares the type only.

    Cost: In each call 0.25 us an object.
    """
    held: list[_Held] = []
    conditions = Conditions(names_beside(builder.scope["G"]))
    for guard in guards:
        name, value = guard.name, value_of(builder, guard)
        if hasattr(value, "__dict__") and is_object(value):
            held.append(_Held(name, "attributes", _own_names, _own_names(value)))
            _require_attributes(conditions, name, value)
        if with_keys and isinstance(value, dict) and not _compares_keys(builder, guard):
            held.append(_Held(name, "keys", _keys, _keys(value)))
            _require_keys(conditions, name, value)
    if held:
        _add_guard(builder, conditions.all_hold(), held)


def _compares_keys(builder: Any, guard: Guard) -> bool:
    return isinstance(builder.get_guard_manager(guard), DictGuardManager)


def _add_guard(
    builder: Any, all_hold: Callable[[dict[str, Any]], bool], held: Sequence[_Held]
) -> None:
    said = [""]

    def is_same(now: dict[str, Any]) -> bool:
        try:  # what the compiler compares of the way to an object is compared later
            if all_hold(now):
                return True
        except MISSING:
            pass
        # The compiler reads what a comparison says of itself when that has failed.
        said[0] = _change(builder, held, now)
        return False

    builder.guard_manager.root.add_lambda_guard(is_same, said, None)


def _require_attributes(conditions: Conditions, name: str, value: Any) -> None:
    own = vars(value)
    stores = [store for store in _STORES if store in own]
    if not all(type(own[store]) is dict for store in stores):
        _require_call(conditions, name, _own_names, value)
        return
    _require_names(conditions, f"({name}).__dict__", own)
    for store in stores:
        _require_names(conditions, f"({name}).__dict__[{store!r}]", own[store])


def _require_keys(conditions: Conditions, name: str, value: Any) -> None:
    may_be_of_class = name.startswith("dict(") or name.endswith("__dict__")
    if type(value) in _PLAIN and not may_be_of_class:
        _require_names(conditions, name, value)
    else:
        _require_call(conditions, name, _keys, value)


def _require_names(conditions: Conditions, path: str, held: dict[Any, Any]) -> None:
    """By dictionaries as they are, without a call of ours, since there are many."""
    found = conditions.value_of(path)
    names = f"{found}.keys() == {conditions.constant(frozenset(held))}"
    conditions.require(names if held else f"not {found}")


def _require_call(
    conditions: Conditions, name: str, look: Callable[[Any], frozenset[Any]], value: Any
) -> None:
    called = f"{conditions.constant(look)}({conditions.value_of(name)})"
    conditions.require(f"{called} == {conditions.constant(look(value))}")


def _own_names(value: Any) -> frozenset[Any]:
    """Names of what an object holds itself; a module's parameters, buffers and children, too."""
    own = vars(value)
    return frozenset(own).union(*[own.get(store) or () for store in _STORES])


def _keys(value: dict[Any, Any]) -> frozenset[Any]:
    """The keys of a dictionary, which may be a class's, where Python takes notes."""
    return frozenset(value).difference(CLASS_NOTES)


def _change(builder: Any, held: Sequence[_Held], now: dict[str, Any]) -> str:
    """In words, which was the first object that holds others."""
    for one in held:
        try:
            if one.look(of_name(builder, one.name)(now)) != one.names:
                return f"the {one.what} of {one.name} changed"
        except MISSING:
            return f"{one.name} changed"
    return "what an object holds changed"
