"""A limit for work that offers none itself: compiling, which may take minutes and cannot be asked to stop.

The limit is an exception that is raised in the thread that works, between two of its bytecodes. Library calls
that are under way end first, so the limit is passed by as much as the longest of them takes.
"""

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator

from ridgeline import units
from ridgeline.errors import CaptureError


class _Late(BaseException):
    """Time is up; no `Exception`, since compilers catch those and go on in another way."""


@contextlib.contextmanager
def deadline(limit_s: float, what: str) -> Iterator[None]:
    """Stop what runs inside when it takes longer.

    Args:
        limit_s: Seconds; infinite sets no limit.
        what: What is done inside, for the message.

    Raises:
        CaptureError: it took longer and was stopped.

    Cost: One sleeping thread.
    """
    if math.isinf(limit_s):
        yield
        return
    alarm = _Alarm(limit_s)
    try:
        try:
            alarm.start()  # it may ring before this returns
            yield
        finally:
            alarm.cancel()
    except _Late:
        raise CaptureError(
            f"wanted {what} within {units.seconds(limit_s)}, got no end of it: it was stopped; allow more "
            "seconds, or use execution='eager'"
        ) from None


class _Alarm:
    """Raises `_Late` in the thread that made it, unless cancelled before."""

    def __init__(self, limit_s: float) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_over = False
        self._timer = threading.Timer(max(0.0, limit_s), self._ring)
        self._timer.daemon = True

    def start(self) -> None:
        """Begin to wait."""
        self._timer.start()

    def cancel(self) -> None:
        """After this nothing is raised any more; what was raised already arrives inside this call."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True

    def _ring(self) -> None:
        with self._lock:
            if not self._is_over:
                self._is_over = True
                _raise_in(self._thread, _Late)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Have another thread raise at its next bytecode.

    Source: `PyThreadState_SetAsyncExc` of the C API, which `ctypes.pythonapi` calls holding the lock.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
