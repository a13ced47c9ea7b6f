"""A limit for work that offers none itself: compiling, which may take minutes and cannot be asked to stop.

The limit is an exception that is raised in the thread that works, between two of its bytecodes. In the main
thread a signal brings it, which also ends waiting (for a lock, for a C++ compiler). A library call that
computes, such as a backward pass, ends first: the limit is passed by as much as that takes, and the error
says by how much.
"""

import contextlib
import ctypes
import inspect
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.utils import _python_dispatch as dispatch

from ridgeline import units
from ridgeline.errors import CaptureError, RidgelineError

AGAIN_S = 5.0
"""An alarm of which nothing came (what a destructor raises is ignored) rings again after this."""
LATE_S = 1.0
"""From this on it is said by how much a limit was passed."""


class _Late(BaseException):
    """Time is up; no `Exception`, since compilers catch those and continue in another way."""


@contextlib.contextmanager
def deadline(
    limit_s: float, what: str, *, error: type[RidgelineError] = CaptureError
) -> Iterator[None]:
    """Stop what runs inside when it takes longer.

    Args:
        limit_s: Seconds; infinite sets no limit.
        what: What is done inside, for the message.
        error: What is raised then.

    Raises:
        RidgelineError: of the type `error`: it took longer and was stopped.

    Cost: One sleeping thread.
    """
    if math.isinf(limit_s):
        yield
        return
    alarm, begin, modes = _Alarm(limit_s), time.monotonic(), _modes()
    try:
        try:
            alarm.start()
            _here.raise_late()  # it may have rung meanwhile
            yield
        finally:
            alarm.cancel()
        _here.raise_late()  # or one around this
    except _Late as late:
        alarm.cancel()  # it may have rung inside the call above
        if not isinstance(late, alarm.kind):
            raise  # that of a limit around this one
        while len(_modes()) > len(modes):  # stopped between entering one and noting that
            dispatch._pop_mode()  # noqa: SLF001 - there is no public name
        over_s = time.monotonic() - begin - limit_s
        words = "it was stopped"
        if over_s > LATE_S:
            words += f", {units.seconds(over_s)} late, as a call into a library had to end first"
        raise error(
            f"wanted {what} within {units.seconds(limit_s)}, got no result: {words}; allow more "
            "seconds, or use execution='eager'"
        ) from None


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no limit stop what runs inside; one that is reached meanwhile stops what comes after it.

    For work that leaves the process unusable where it is broken off: the capture of a CUDA graph.
    """
    with _here.lock:
        _here.depth += 1
    try:
        yield
    finally:
        with _here.lock:
            _here.depth -= 1
    _here.raise_late()


class _Limits(threading.local):
    """The limits that this thread works under, outermost first, and whether it must not be stopped now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.alarms: list[_Alarm] = []
        self.depth = 0

    def raise_late(self) -> None:
        """Raise where a limit was passed, unless it must wait."""
        if not self.depth:
            for alarm in self.alarms:
                if alarm.has_rung and not alarm.is_over:
                    raise alarm.kind


_here = _Limits()


class _Alarm:
    """Raises its own kind of `_Late` in the thread that made it, unless cancelled before."""

    def __init__(self, limit_s: float) -> None:
        # A class of its own: limits nest, and each must know its own exception from those around it.
        self.kind = type("_Late", (_Late,), {})
        self.has_rung = self.is_over = False
        # No event: what is raised in the midst of setting one leaves it locked, for whoever sets it again.
        self._end = threading.Lock()
        self._end.acquire()
        self._limit_s = min(max(0.0, limit_s), threading.TIMEOUT_MAX)
        self._limits = _here.__dict__  # of this thread, for the one that waits
        self._ident = threading.get_ident()
        self._before: Any = None
        self._waiting = threading.Thread(target=self._wait, name="ridgeline-limit", daemon=True)

    def start(self) -> None:
        _here.alarms.append(self)
        before = signal.getsignal(signal.SIGURG)
        # Python runs handlers in the main thread only; None is one that C code has set, which cannot be put
        # back.
        if threading.current_thread() is threading.main_thread() and before is not None:
            self._before = before
            signal.signal(signal.SIGURG, _arrive)
        self._waiting.start()

    def cancel(self) -> None:
        """After this nothing is raised any more; what was raised already arrives inside this call."""
        self.is_over = True
        if self._end.locked():
            self._end.release()
        with _here.lock:
            pass  # the other thread is not about to ring
        if self._before is not None:
            signal.signal(signal.SIGURG, self._before)
            self._before = None
        # It may ring before `start` has noted it, and `cancel` may be called twice.
        if self in _here.alarms:
            _here.alarms.remove(self)

    def _wait(self) -> None:
        delay_s = self._limit_s
        while not self._end.acquire(timeout=delay_s):
            delay_s = AGAIN_S
            with self._limits["lock"]:
                if self.is_over:
                    return
                self.has_rung = True
                if self._limits["depth"]:
                    continue
                if self._before is not None:
                    # By default nothing handles this signal, so that one which comes late does no harm.
                    signal.pthread_kill(self._ident, signal.SIGURG)
                else:
                    _raise_in(self._ident, self.kind)


def _arrive(number: int, frame: FrameType | None) -> None:
    if not _is_between(frame):
        _here.raise_late()


def _is_between(frame: FrameType | None) -> bool:
    """Whether a limit is about to begin or end: outside of its `try`, nobody takes what is raised for it.

    Inside it looks itself, and Python's locks and threads are not left half changed.
    """
    if frame is not None and frame.f_code in _AROUND:
        generator = getattr(frame.f_locals.get("self"), "gen", None)
        return getattr(generator, "gi_code", None) is _LIMIT
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame is not None


_LIMIT = inspect.unwrap(deadline).__code__
_AROUND = tuple(
    vars(contextlib._GeneratorContextManager)[name].__code__  # noqa: SLF001 - what `deadline` returns
    for name in ("__enter__", "__exit__")
)


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Have another thread raise at its next bytecode.

    Source: `PyThreadState_SetAsyncExc` of the C API, which `ctypes.pythonapi` calls holding the lock.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _modes() -> list[Any]:
    """The dispatch modes that are on, such as those of a compiler that traces."""
    return dispatch._get_current_dispatch_mode_stack()  # noqa: SLF001 - there is no public name
