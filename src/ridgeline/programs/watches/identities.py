"""Which of a program's objects are one: code may ask with `is`; torch's compiler compares each by itself."""

import dis
import types
from collections.abc import Iterable, Sequence
from typing import Any

from ridgeline.reach.owners import is_users, is_users_class

_CONTAINERS = (list, dict, set)
_OF_MODULES = ("_hooks", "_parameters", "_buffers", "_modules")
"""Ends of names of what torch keeps in each module."""


def asks_identity(code: Iterable[types.CodeType]) -> bool:
    """Whether code of the user's compares with `is`, but for constants such as None."""
    return any(is_users(part.co_filename) and _asks(part) for part in code)


def may_be_one(name: str, value: Any) -> bool:
    """Whether an object is one that code of the user's may share: of the user's class, or a container."""
    if isinstance(value, type):
        return False
    return is_users_class(type(value)) or (
        type(value) in _CONTAINERS and not name.rstrip("]'").endswith(_OF_MODULES)
    )


def pattern(values: Sequence[Any]) -> list[int]:
    """For each object the first place at which it stands."""
    first: dict[int, int] = {}
    return [first.setdefault(id(value), place) for place, value in enumerate(values)]


def _asks(code: types.CodeType) -> bool:
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before is not None and before.opname != "LOAD_CONST":
            return True
        before = instruction
    return False
