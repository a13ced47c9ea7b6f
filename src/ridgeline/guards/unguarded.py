"""What the guards of torch's compiler leave out, and `added` cannot add to them.

Elements of NumPy's arrays, attributes that are missing (of functions, too), or that a class would hide.
"""

import builtins
import inspect
import math
import types
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from ridgeline.guards.reading import ProgramReading, UnreadableError
from ridgeline.programs.watches.conditions import Conditions, reader
from ridgeline.reach.owners import is_users, is_users_class

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
_STORES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what it finds only after it has looked into its class."""
MOST_BYTES = 4096
"""Of an array of NumPy's that a program reads; comparing takes 1 us."""


def require_unguarded(
    conditions: Conditions, reading: ProgramReading, arguments: dict[str, Any]
) -> None:
    """Require all of that to stay as it is now.

    Raises:
        UnreadableError: there is an array with more elements than can be compared.
    """
    for text, array in _arrays(reading, arguments).items():
        if isinstance(array, numpy.generic):  # cannot change, and may be another object each time
            elements, now = array.tobytes(), conditions.value_of(_inner(text))
        else:
            elements, now = _small(array).tobytes(), conditions.constant(array)
        conditions.require(f"{now}.tobytes() == {conditions.constant(elements)}")
    # `vars(...).keys()` is a view, so that one look sees attributes that come later.
    for function in filter(_is_users_function, reading.kept):
        has_names = conditions.constant(vars(function).keys())
        conditions.require(f"{has_names} == {conditions.constant(frozenset(vars(function)))}")
    has = conditions.constant(_has)
    for value, name in _missing(reading):
        conditions.require(f"not {has}({conditions.constant(value)}, {name!r})")
    for kind, names in _own_names(reading).items():
        free, taken = conditions.constant(frozenset(names)), conditions.constant(vars(kind))
        conditions.require(f"{free}.isdisjoint({taken})")


def numbers_of_numpy(reading: ProgramReading, arguments: dict[str, Any]) -> frozenset[str]:
    """Expressions of tensors that the program makes of a number of NumPy's, which lie elsewhere each time."""
    found = _arrays(reading, arguments).items()
    return frozenset(text for text, value in found if isinstance(value, numpy.generic))


def _arrays(reading: ProgramReading, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arrays and numbers of NumPy's that the program makes tensors of, by the expressions of these."""
    read = [text for text in reading.tensors if text.startswith(_ARRAY)]
    values = reader([*map(_inner, read)], reading.scope)(arguments)
    return dict(zip(read, values, strict=True))


def _inner(text: str) -> str:
    return text.removeprefix(_ARRAY)[:-1]


def _small(array: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The array, if its elements can be compared before every call."""
    if array.nbytes > MOST_BYTES:
        raise UnreadableError(
            f"wanted arrays of NumPy of at most {MOST_BYTES} bytes, whose elements are compared before every "
            f"call, got one of {array.nbytes} bytes; make it a tensor, and a buffer of the model"
        )
    return array


def _is_users_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and is_users(value.__code__.co_filename)


def _missing(reading: ProgramReading) -> list[tuple[Any, str]]:
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


def _own_names(reading: ProgramReading) -> dict[type, set[str]]:
    """Names of what objects hold themselves, by classes of the user's that would hide it if they had them."""
    found: dict[type, set[str]] = {}
    for value in reading.kept:
        if isinstance(value, (type, types.ModuleType)) or not is_users_class(type(value)):
            continue
        own = getattr(value, "__dict__", {})
        names = set(own).union(*(own.get(store, ()) for store in _STORES))
        for base in filter(is_users_class, type(value).__mro__):
            found.setdefault(base, set()).update(names)
    # What a class has already hides nothing that the program has not seen.
    return {kind: names - vars(kind).keys() for kind, names in found.items()}


def _is_anywhere(name: str, values: Iterable[Any]) -> bool:
    return any(hasattr(common, name) for common in _COMMON) or any(
        _has(value, name) for value in values
    )


def _has(value: Any, name: str) -> bool:
    """Whether it has an attribute, without running its code."""
    own = getattr(value, "__dict__", ())
    if name in own:
        return True
    kept = (own.get(store, ()) for store in _STORES) if own else ()
    return any(name in store for store in kept) or any(
        name in vars(base) for base in type(value).__mro__
    )


def _methods(kind: type) -> list[types.FunctionType]:
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    return [value for value in values if inspect.isfunction(value)]
