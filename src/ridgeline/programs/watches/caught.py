"""What code of a program looks for and catches, by its byte code: source need not be there."""

import builtins
import dis
import types
from collections.abc import Iterable, Iterator

import torch
from torch._dynamo import polyfills

_TORCH = torch.__path__[0]
_STANDARD = polyfills.__path__[0]
"""Where the compiler has Python of its own for code of the standard library."""


def has_names(code: Iterable[types.CodeType], names: frozenset[str]) -> bool:
    """Whether code names one of these, but for torch's."""
    return any(not names.isdisjoint(part.co_names) for part in not_of_torch(code))


def not_of_torch(code: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    """Code but for torch's own."""
    for part in code:
        if not part.co_filename.startswith(_TORCH) or part.co_filename.startswith(_STANDARD):
            yield part


def catches_unknown(code: types.CodeType) -> bool:
    """Whether it catches errors without saying which, or by a name that only says it when the code runs."""
    loaded: set[str] = set()
    before = ""
    for instruction in dis.get_instructions(code):
        if before == "PUSH_EXC_INFO":
            loaded.clear()
            if instruction.opname == "POP_TOP":  # a bare `except:`
                return True
        if instruction.opname == "CHECK_EXC_MATCH":
            if any(not hasattr(builtins, name) for name in loaded):
                return True
            loaded.clear()
        if instruction.opname.startswith("LOAD_"):
            loaded.add(str(instruction.argval))
        before = instruction.opname
    return False
