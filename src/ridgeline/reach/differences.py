"""Where two values differ: dictionaries, tuples, lists and objects of any class are compared part by part."""

import collections
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from ridgeline.reach.reach import slots_of

_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_WHOLE = (Tensor, nn.Module, type, types.FunctionType, types.ModuleType)
"""What is one thing to a reader, and not its attributes."""


def differences(before: Any, now: Any) -> Iterator[tuple[Any, Any]]:
    """What stands at the same place in two values and is not the same object, from them to their parts."""
    seen: set[tuple[int, int]] = set()
    pairs = [(before, now)]
    while pairs:
        old, new = pairs.pop()
        if old is not new and (id(old), id(new)) not in seen:
            seen.add((id(old), id(new)))
            yield old, new
            if have_same_places(old, new):
                later = parts_of(new)
                pairs += [(part, later[place]) for place, part in parts_of(old).items()]


def have_same_places(before: Any, now: Any) -> bool:
    """Whether two objects have parts at the same places, and so differ in these; else they do as a whole."""
    places = parts_of(before).keys()
    return bool(places) and type(before) is type(now) and places == parts_of(now).keys()


def members_of(value: Any, is_whole: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """A value, its parts, and theirs; each object once.

    Args:
        value: Of any kind.
        is_whole: Where given, objects that are left out with their parts.
    """
    seen: dict[int, Any] = {}
    found = [value]
    while found:
        one = found.pop()
        if id(one) not in seen and not (is_whole is not None and is_whole(one)):
            seen[id(one)] = one
            found += parts_of(one).values()
            yield one


def parts_of(value: Any) -> dict[Any, Any]:
    """The parts of a container or of an object by their places; none of what is one thing."""
    if isinstance(value, _WHOLE):
        return {}
    parts: dict[Any, Any] = {}
    if isinstance(value, dict):
        parts = {("of key", key): dict.__getitem__(value, key) for key in dict.keys(value)}
    elif isinstance(value, _SEQUENCES):
        parts = dict(enumerate(value))
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        parts |= {("in", name): part for name, part in own.items()}
    missing = object()
    for name in slots_of(type(value)):
        if (part := getattr(value, name, missing)) is not missing:
            parts["in", name] = part
    return parts
