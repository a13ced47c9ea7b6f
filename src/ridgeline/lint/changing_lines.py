"""Which lines of the user's code change a variable, an entry or a container, by the bytecode of what ran."""

import dis
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType

from ridgeline.lint.lint_lines import is_users

_STORES = (
    *("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"),
    *("DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF", "DELETE_NAME"),
)
_ENTRIES = ("STORE_SUBSCR", "DELETE_SUBSCR")
_GROWING = frozenset((
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "put",
    "remove", "setdefault", "update",
))  # fmt: skip
"""Methods after which a container holds more, or less."""
_MOST_LINES = 3
UNKNOWN = "an unknown line"


def changing_lines(what: str, codes: Iterable[CodeType]) -> str:
    """The lines that may have made a change, `solver.py:12 in count`; `UNKNOWN` where none is found.

    Args:
        what: The change in the words of `changed_in_python`: a name in quotes, or a part of a container.
        codes: Code that ran; that of libraries does not count.
    """
    users = [code for code in codes if is_users(code)]
    found = dict.fromkeys(line for code in users for line in _lines(what, code))
    if not found or len(found) > _MOST_LINES:
        return UNKNOWN
    return " or ".join(found)


def _lines(what: str, code: CodeType) -> Iterator[str]:
    quoted = re.fullmatch(r"'(\w+)'", what)
    name = quoted[1] if quoted else None
    before: dis.Instruction | None = None
    line = code.co_firstlineno
    for step in dis.get_instructions(code):
        if step.positions is not None and step.positions.lineno is not None:
            line = step.positions.lineno
        if name is not None:
            is_key = before is not None and before.opname == "LOAD_CONST" and before.argval == name
            is_it = step.opname in _STORES and step.argval == name
            is_it = is_it or (step.opname in _ENTRIES and is_key)
            is_it = is_it or (is_key and "setattr" in code.co_names)
        else:
            is_it = step.opname in _ENTRIES
            is_it = is_it or (
                step.opname in ("LOAD_METHOD", "LOAD_ATTR") and step.argval in _GROWING
            )
        if is_it:
            yield f"{_shown(code.co_filename)}:{line} in {code.co_name}"
        before = step


def _shown(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
