"""Ctrl-C at any moment leaves an engine that ends, runs no task twice, and keeps the order of what runs."""

import contextlib
import dis
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from ridgeline.errors import EngineError
from ridgeline.runtime.engine import Engine
from ridgeline.runtime.engine.lanes import WorkLane

CHECKS = ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
"""Instructions after which the interpreter looks for signals."""


def done_future() -> Any:
    future: Any = torch.futures.Future()
    future.set_result(None)
    return future


class Program:
    """Pushes, waits, cancels and deletes on lanes of every kind, and records what ran.

    Attributes:
        ran: Numbers of the tasks in the order in which they ran, by variable.
    """

    def __init__(self, lanes: tuple[str, ...], length: int) -> None:
        self._lanes = lanes
        self._length = length
        self.engine = Engine(threads={"disk": 2}, lanes={"communication": WorkLane}, max_pending=6)
        self.ran: list[list[int]] = [[], [], []]

    def run(self) -> None:
        """Everything that may be interrupted, the end of the `with` included."""
        with self.engine as engine:
            variables = [engine.variable(str(index)) for index in range(3)]
            for number in range(self._length):
                lane, at = self._lanes[number % len(self._lanes)], number % 3
                task = engine.push(
                    self._work(number, at, lane),
                    reads=[variables[(at + 1) % 3]],
                    writes=[variables[at]],
                    lane=lane,
                    num_bytes=number % 2,
                    priority=number % 5 // 4,
                )
                if number % 4 == 1:
                    engine.push(lambda: None, lane="host")
                if number % 6 == 5:
                    engine.cancel(task)
                    engine.clear_error(variables[at])
                    engine.wait(variables[at])
                if number % 7 == 6:
                    engine.end_batch()
            engine.wait_all()
            engine.delete(variables[0])

    def _work(self, number: int, at: int, lane: str) -> Callable[[], Any]:
        def work() -> Any:
            self.ran[at].append(number)
            if number % 5 == 0:
                self.engine.push(lambda: None, lane="compute")
            return done_future() if lane == "communication" else None

        return work

    def check(self) -> None:
        """The engine ends, and what ran did so once and in order."""
        with contextlib.suppress(EngineError):  # what the interrupt poisoned
            self.engine.close()
        statistics = self.engine.statistics()
        assert statistics.pending == 0
        assert statistics.pushed >= statistics.done >= 0
        for numbers in self.ran:
            assert numbers == sorted(set(numbers))
        left = [t for t in threading.enumerate() if t.name.startswith("ridgeline-")]
        assert not [thread for thread in left if thread.is_alive()]
        # An interrupted join takes a thread for ended a moment early; one that never started raises.
        for thread in left:
            thread.join()


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
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if "runtime/engine" not in file and file != threading.__file__:
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


LANES = (
    ("host", "loader"),
    ("loader", "disk", "compute"),
    ("communication", "host", "loader"),
)


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


def test_signals_at_random_times_leave_engines_that_end() -> None:
    """1,000 times Ctrl-C while a program runs, wherever Python takes it; sometimes two in a row."""
    draw = random.Random(0)
    num_struck = 0
    while num_struck < 1000:
        program = Program(LANES[num_struck % 3], 40)
        after_s = [draw.uniform(1e-4, 4e-3), *draw.choice(([], [], [1e-3]))]
        may_begin, is_over = threading.Lock(), threading.Event()
        may_begin.acquire()
        main = threading.get_ident()
        striker = threading.Thread(target=strike, args=(main, after_s, may_begin, is_over))
        striker.start()
        try:
            may_begin.release()
            program.run()
        except KeyboardInterrupt:
            num_struck += 1
        except EngineError:
            pass
        finally:
            end(striker, is_over)
        program.check()


def strike(main: int, after_s: list[float], may_begin: Any, is_over: threading.Event) -> None:
    """Interrupt the main thread each of these times after the other, until it has ended."""
    may_begin.acquire()
    for time_s in after_s:
        if not is_over.wait(time_s):
            signal.pthread_kill(main, signal.SIGINT)


def end(striker: threading.Thread, is_over: threading.Event) -> None:
    """No more interrupts, also if one comes meanwhile."""
    while True:
        try:
            is_over.set()
            striker.join()
            return
        except KeyboardInterrupt:
            continue
