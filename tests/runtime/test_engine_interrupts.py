"""Ctrl-C at any moment leaves an engine that ends, runs no task twice, and keeps the order of what runs."""

import contextlib
import dis
import gc
import random
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import interrupted_engines
import pytest
from interrupted_engines import LANES, Aim, Program, interrupt

from ridgeline.errors import EngineError

CHECKS = ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
"""Instructions after which the interpreter looks for signals."""


class Interrupter:
    """Raises KeyboardInterrupt at the given one of the moments at which Python may.

    In the engine's code and in that of threads, which it calls.
    """

    def __init__(self, moment: int) -> None:
        self._left = moment
        self._before: dict[FrameType, str] = {}
        self.where: str = ""

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Meanwhile it may strike."""
        # Python 3.12 traces instructions where a frame has asked for them before tracing began.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if "ridgeline/engine" not in file and file != threading.__file__:
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            before = self._before.get(frame)
            self._before[frame] = operations(frame.f_code)[frame.f_lasti]
            if before in CHECKS:
                self._left -= 1
                if not self._left:
                    self.where = (
                        f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                    )
                    raise KeyboardInterrupt
        elif event == "return":
            self._before.pop(frame, None)
        return self._step


_operations: dict[CodeType, dict[int, str]] = {}


def operations(code: CodeType) -> dict[int, str]:
    """The names of a code's instructions by offset."""
    if code not in _operations:
        _operations[code] = {step.offset: step.opname for step in dis.get_instructions(code)}
    return _operations[code]


@pytest.mark.parametrize("lanes", LANES)
def test_an_interrupt_at_any_moment_leaves_an_engine_that_ends(lanes: tuple[str, ...]) -> None:
    """At moments of the engine's code, from the first push to the end of the `with`."""
    struck = set()
    draw = random.Random(0)
    moment = 0
    while True:
        moment += draw.randrange(1, 12)
        program, interrupter = Program(lanes, 14), Interrupter(moment)
        with contextlib.suppress(KeyboardInterrupt, EngineError), interrupter.active():
            program.run()
        program.check()
        if not interrupter.where:
            break
        struck.add(interrupter.where)
    assert len(struck) > 20


# Python drops an interrupt that comes while a weak reference is called back, as those of its own set of threads are.
@pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <function WeakSet:pytest.PytestUnraisableExceptionWarning"
)
def test_signals_at_random_times_leave_engines_that_end() -> None:
    """1,000 times Ctrl-C while a program runs, wherever Python takes it; sometimes two in a row."""
    # Hypothesis is called at collections: one that meets it there says nothing of engines.
    callbacks = gc.callbacks.copy()
    gc.callbacks.clear()
    try:
        assert interrupt(1000, 0) == 1000
    finally:
        gc.callbacks.extend(callbacks)


def test_interrupts_reach_a_process_that_a_shell_has_begun_in_the_background() -> None:
    """There SIGINT is ignored from the beginning: it would be sent for ever, and none would come."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert interrupt(3, 0) == 3
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_programs_that_no_interrupt_meets_are_not_begun_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where signals are blocked: the script says so instead of going on."""
    monkeypatch.setattr(interrupted_engines, "MOST_MISSED", 20)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with pytest.raises(AssertionError, match="20 programs in a row met no interrupt"):
            interrupt(1, 0)
    finally:
        while signal.SIGINT in signal.sigpending():
            signal.sigwait([signal.SIGINT])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def test_what_is_told_of_a_dropped_interrupt_is_not_interrupted_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second Ctrl-C while pytest notes the first, which came in a finalizer, would fail the test."""
    told: list[str] = []

    def note(unraisable: "sys.UnraisableHookArgs") -> None:
        signal.raise_signal(signal.SIGINT)
        told.append(type(unraisable.exc_value).__name__)

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "unraisablehook", note)
    aim = Aim()
    before = signal.signal(signal.SIGINT, aim)
    try:
        with aim.sparing_unraisable_hook():
            aim.is_on = True
            Finalized()
            assert aim.is_on
            aim.is_on = False
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == ["KeyboardInterrupt"]
