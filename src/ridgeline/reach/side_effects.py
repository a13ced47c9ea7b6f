"""What a step does that cannot be taken back: it draws from an iterator, or writes outside of the process.

A trace or a trial runs the step without training it. What it changed in Python's memory is put back (see
`undo`); an iterator does not go backwards, and a line in a file stays.
"""

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline.errors import SideEffectError
from ridgeline.reach.owners import is_standard, is_users
from ridgeline.reach.reach import Reach, methods_of, names_in, underlying
from ridgeline.reach.undo import load

_WRITES = frozenset((
    "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.system", "os.truncate", "socket.connect",
    "socket.sendto", "sqlite3.connect", "subprocess.Popen", "urllib.Request",
))  # fmt: skip
"""Audit events, besides `open`, of what leaves the process; https://docs.python.org/3/library/audit_events.html"""
_OPEN_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CALLED = ("forward", "step", "zero_grad", "backward")
"""Methods that a step calls, besides those that its code names."""
_SERIALIZERS = tuple(
    str(Path(*parts))
    for parts in (("torch", "serialization.py"), ("numpy", "lib"), ("pandas", "io"))
)
"""Of libraries, what writes the files that the user names."""


class _Watch(threading.local):
    """Of a thread: whether writes are refused, and what was tried."""

    def __init__(self) -> None:
        self.is_on = False
        self.tried = ""


_watch = _Watch()


def refuse_streams(*roots: Any) -> None:
    """Raise if iterators or open files can be reached from model, loss function, optimizer or batch.

    Raises:
        SideEffectError: names each.
    """
    found = streams(*roots)
    if found:
        raise SideEffectError(
            f"wanted a step that can be run again, got {', '.join(found)} within its reach; take from "
            "iterators outside of the step and pass what they give in the batch, write to files after it"
        )


def streams(*roots: Any) -> list[str]:
    """Iterators and open files that the step's code may use, each in a few words.

    An attribute that no code names which the step may call (a trainer's loader, say, beside its loss) does
    not count.
    """
    reach = Reach(*roots)
    if not reach.streams:
        return []
    holders: dict[int, set[str]] = {}
    for store in (*reach.stores, *reach.attributes):
        if isinstance(store, dict):
            for name, value in store.items():
                holders.setdefault(id(value), set()).add(str(name))
    for cell in reach.cells:
        holders.setdefault(id(load(cell)), set()).add(cell.label)
    used = _used_names(reach, roots)
    found = []
    for stream in reach.streams:
        held, kind = holders.get(id(stream), set()), type(stream).__name__
        if not held:
            found.append(f"a {kind}")
        elif held & used:
            found.append(f"{min(held & used)} (a {kind})")
    return found


def _used_names(reach: Reach, roots: tuple[Any, ...]) -> set[str]:
    """Names and texts in code that a step may call: its functions, and the methods that these name."""
    codes = [underlying(root).__code__ for root in roots if hasattr(underlying(root), "__code__")]
    codes += [function.__code__ for function in reach.functions]
    methods = [item for kind in reach.classes for item in methods_of(kind)]
    used: set[str] = set()
    while codes:
        used = used.union(*map(names_in, codes))
        called = [m for m in methods if m[0] in used or m[0] in _CALLED or _is_implicit(m[0])]
        codes = [function.__code__ for _, function in called]
        methods = [m for m in methods if m not in called]
    return used


def _is_implicit(name: str) -> bool:
    return name.startswith("__") and name not in ("__init__", "__del__")


@contextlib.contextmanager
def refusing_writes() -> Iterator[None]:
    """Inside, in this thread, the user's code cannot write to files or sockets: it raises before it does.

    What libraries write on their own account (caches of compilers) passes.

    Raises:
        SideEffectError: the user's code tried, even where it caught that error; says what and where.

    Cost: Installs an audit hook at its first use, which stays: about 0.1 us an audited event.
    """
    _install()
    before = _watch.is_on, _watch.tried
    _watch.is_on, _watch.tried = True, ""
    try:
        yield
        if _watch.tried:
            raise SideEffectError(_watch.tried)
    except Exception as error:
        if _watch.tried and not isinstance(error, SideEffectError):  # which was translated
            raise SideEffectError(_watch.tried) from error
        raise
    finally:
        _watch.is_on, _watch.tried = before


@functools.cache
def _install() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    # First what decides most: the hook is called for every audited event of the process, and cannot be
    # removed.
    if not _watch.is_on or (event != "open" and event not in _WRITES):
        return
    if event == "open" and not _writes(*arguments):
        return
    where = _users_line()
    if where:
        what = f"{event} of {arguments[0]!r}" if arguments else event
        _watch.tried = (
            f"wanted a step that can be run again, got {what} ({where}), which cannot be taken back; write "
            "to files and sockets after the step"
        )
        raise SideEffectError(_watch.tried)


def _writes(path: Any, mode: Any, flags: Any) -> bool:
    """Whether a file is opened to be changed; descriptors that are open already are others' affair."""
    if isinstance(path, int) or path in (os.devnull, os.devnull.encode()):
        return False
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & _OPEN_TO_WRITE)


def _users_line() -> str:
    """File and line of the user's code that acts; nothing where a library acts on its own account."""
    for frame, line in traceback.walk_stack(sys._getframe(2)):  # noqa: SLF001 - the documented way
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib"):  # which writes bytecode
            return ""
        if is_users(name):
            return f"{Path(name).name}:{line}"
        if not (is_standard(name) or any(part in name for part in _SERIALIZERS)):
            return ""
    return ""
