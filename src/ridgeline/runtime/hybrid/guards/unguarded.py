"""What the guards of torch's compiler leave out.

The sign of zero, lists in tuples, elements of NumPy's arrays, attributes that are missing.
"""

import builtins
import inspect
import math
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy
import torch

from ridgeline.reach.reach import is_users
from ridgeline.runtime.hybrid.guards.places import reader
from ridgeline.runtime.hybrid.guards.reading import Reading, UnreadableError

_COMMON = (
    torch.Tensor,
    torch,
    builtins,
    list,
    dict,
    set,
    tuple,
    str,
    int,
    float,
    bytes,
    type,
    math,
)
"""Where a name may come from that no object of the program has."""
_ARRAY = "___from_numpy("
"""How the compiler's expression of a tensor begins that shares the memory of an array."""
MOST_BYTES = 4096
"""Of an array of NumPy's that a program reads; comparing takes 1 us."""


def watch_unguarded(
    reading: Reading, signed: Callable[[dict[str, Any]], Sequence[float]], arguments: dict[str, Any]
) -> Callable[[dict[str, Any]], bool]:
    """A function that says whether all of that is as it is now.

    Args:
        reading: Of the program.
        signed: Gives the numbers that are zero, from the arguments.
        arguments: As they are now.

    Raises:
        UnreadableError: there is an array with more elements than can be compared.

    Cost: When called, nothing where there is none of it, as a rule.
    """
    signs = [*map(math.copysign, repeat(1.0), signed(arguments))]
    tuples = [value for value in reading.kept if _holds_containers(value)]
    contents = [*map(_content, tuples)]
    read = [text.removeprefix(_ARRAY)[:-1] for text in reading.tensors if text.startswith(_ARRAY)]
    arrays = reader(read, reading.scope)(arguments)
    elements = [array.tobytes() for array in map(_small, arrays)]
    missing = _missing(reading)

    def is_unchanged(now: dict[str, Any]) -> bool:
        if signs and [*map(math.copysign, repeat(1.0), signed(now))] != signs:
            return False
        if tuples and [*map(_content, tuples)] != contents:
            return False
        if arrays and [array.tobytes() for array in arrays] != elements:
            return False
        return not any(_has(value, name) for value, name in missing)

    return is_unchanged


def _small(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The array, if its elements can be compared before every call."""
    if array.nbytes > MOST_BYTES:
        raise UnreadableError(
            f"wanted arrays of NumPy of at most {MOST_BYTES} bytes, whose elements are compared before every "
            f"call, got one of {array.nbytes} bytes; make it a tensor, and a buffer of the model"
        )
    return array


def _holds_containers(value: Any) -> bool:
    """Whether it is a tuple with something in it that can change."""
    return isinstance(value, tuple) and any(
        isinstance(part, (list, dict, set)) or _holds_containers(part) for part in value
    )


def _content(value: Any) -> Any:
    """What a nest of containers holds: plain values with their types, objects by identity."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_content, value))
    if isinstance(value, dict):
        return dict, tuple((key, _content(part)) for key, part in value.items())
    if isinstance(value, (int, float, str, bytes, types.NoneType)):
        return type(value), value, math.copysign(1.0, value) if isinstance(value, float) else None
    return id(value)


def _missing(reading: Reading) -> list[tuple[Any, str]]:
    """Attributes that methods of the program ask for, and their objects have not."""
    unresolved = {
        code: names
        for code in reading.code
        if is_users(code.co_filename)
        and (names := frozenset(n for n in code.co_names if not _is_anywhere(n, reading.kept)))
    }
    found: list[tuple[Any, str]] = []
    for value in reading.kept:
        if unresolved and not isinstance(value, (type, types.ModuleType, torch.Tensor)):
            codes = {f.__code__ for f in _methods(type(value))}
            found += [(value, n) for code in codes & unresolved.keys() for n in unresolved[code]]
    return found


def _is_anywhere(name: str, values: Iterable[Any]) -> bool:
    return any(hasattr(common, name) for common in _COMMON) or any(
        _has(value, name) for value in values
    )


def _has(value: Any, name: str) -> bool:
    """Whether it has an attribute, without running its code."""
    own = getattr(value, "__dict__", ())
    if name in own:
        return True
    kept = (own.get(store, ()) for store in ("_parameters", "_buffers", "_modules")) if own else ()
    return any(name in store for store in kept) or any(
        name in vars(base) for base in type(value).__mro__
    )


def _methods(kind: type) -> list[types.FunctionType]:
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    return [value for value in values if inspect.isfunction(value)]
