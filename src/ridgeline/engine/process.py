"""Which process an engine belongs to: a forked child has a copy of it, without its threads."""

import os
import sys
import weakref
from contextlib import suppress

from ridgeline.errors import EngineError


class Process:
    """The process that made it.

    Attributes:
        is_forked: The caller is another process. Set by the fork, since asking for the process number at
            every push would cost a system call.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.is_forked = False
        _made_here.add(self)

    def check(self, what: str) -> None:
        """Raise an EngineError in a forked child, whose copy of the engine may hold locks for good."""
        if self.is_forked:
            raise EngineError(
                f"wanted {what} in process {self._pid}, which made the engine, got its forked child "
                f"{os.getpid()}; make a new Engine in the child"
            )


def end_child(error: BaseException | None) -> None:
    """End a process that a task forked in a lane's thread and came back from: nothing else runs in it.

    Its status is 1 where the task raised, which is printed, and that of `sys.exit` where it called that.
    """
    status = 0
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        status = error.code or 0
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # it is none, or closed
            stream.flush()
    os._exit(status)


_made_here: weakref.WeakSet[Process] = weakref.WeakSet()


def _tell_the_child() -> None:
    for process in _made_here:
        process.is_forked = True
    _made_here.clear()


os.register_at_fork(after_in_child=_tell_the_child)
