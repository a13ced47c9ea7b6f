"""What classes that say so themselves take for their instances: abstract ones, and protocols.

To torch's compiler `isinstance` is settled by the class of the object. A class may be registered with an
abstract one later, and an object may get the method that a protocol asks for.
"""

import abc
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ridgeline.reach.owners import is_users_class

_NO_OBJECTS = (type, types.ModuleType, types.FunctionType, torch.Tensor)


def classes_in_cells(value: Any) -> tuple[type, ...]:
    """The classes in a function's closure, which the compiler does not compare."""
    if not isinstance(value, types.FunctionType) or value.__closure__ is None:
        return ()
    # An empty cell, of a name that has no value yet, is compared with what it was like any other.
    contents = [getattr(cell, "cell_contents", None) for cell in value.__closure__]
    return tuple(content for content in contents if isinstance(content, type))


def instance_checks(values: Sequence[Any]) -> list[Callable[[Any], bool]]:
    """For each class of the user's that decides itself, whether its instances are those of now.

    Each takes an argument, the local variables of a call, which say nothing of it.

    Args:
        values: What a program reads, classes and objects.

    Cost: A check takes 0.1 us for an abstract class while none is registered anywhere, else 0.5 us a value.
    """
    given = (part for value in values for part in (value, *classes_in_cells(value)))
    objects = [found for value in values if (found := _reference(value)) is not None]
    checks: list[Callable[[Any], bool]] = []
    for kind in dict.fromkeys(filter(_decides_itself, given)):
        try:
            now = _instances(kind, objects)
        except TypeError:  # a protocol that cannot be asked, which no program asks
            continue
        checks.append(functools.partial(_is_as_before, kind, objects, now, _token(kind)))
    return checks


def _reference(value: Any) -> Callable[[], Any] | None:
    if isinstance(value, _NO_OBJECTS):
        return None
    try:
        return weakref.ref(value)
    except TypeError:  # a number or a list, which no user's class has for an instance by itself
        return None


def _decides_itself(value: Any) -> bool:
    if not isinstance(value, type) or not is_users_class(value):
        return False
    return type(value).__instancecheck__ is not type.__instancecheck__


def _instances(kind: type, objects: Iterable[Callable[[], Any]]) -> list[bool]:
    return [isinstance(value(), kind) for value in objects]


def _token(kind: type) -> Any:
    """What changes where a class is registered; of others than abstract classes nothing is known."""
    return abc.get_cache_token() if type(kind) is abc.ABCMeta else None


def _is_as_before(
    kind: type, objects: Iterable[Callable[[], Any]], now: list[bool], token: Any, _: Any
) -> bool:
    is_unchanged = token is not None and abc.get_cache_token() == token
    return is_unchanged or _instances(kind, objects) == now
