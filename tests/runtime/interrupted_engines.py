"""Ctrl-C at random times while an engine works.

    python tests/runtime/interrupted_engines.py [INTERRUPTS] [SEED]

interrupts programs INTERRUPTS times (1,000), and says how many engines ended, which ran no task twice and kept the
order of what ran. Every hundredth interrupt is told of on stderr; a program that is not over after DEADLINE_S has the
stacks of all threads written there, and ends all with status 1. `test_engine_interrupts.py` does the same.
"""

import contextlib
import faulthandler
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ridgeline.engine import Engine
from ridgeline.engine.lanes.lanes import WorkLane
from ridgeline.errors import EngineError

LANES = (
    ("host", "loader"),
    ("loader", "disk", "compute"),
    ("communication", "host", "loader"),
)
DEADLINE_S = 120.0
"""A program takes a few milliseconds, on a crowded machine as much longer as it is kept from a core."""
_TOLD_EVERY = 100
MOST_MISSED = 1_000
"""Programs in a row that are over before their interrupt comes; about one of ten is."""


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


def interrupt(times: int, seed: int, begin: Callable[[int], None] = lambda num_struck: None) -> int:
    """Interrupt programs, and check each; how many interrupts met one.

    Args:
        times: How many are to meet one.
        seed: Of when they come.
        begin: Called before each program, with how many did so far.

    Raises:
        AssertionError: an engine did not end as it should, or interrupts do not reach this process.
    """
    draw = random.Random(seed)
    num_struck = num_missed = 0
    # A shell starts what is to run in the background with SIGINT ignored, so that none would ever come.
    aim = Aim()
    before = signal.signal(signal.SIGINT, aim)
    try:
        with aim.sparing_unraisable_hook():
            while num_struck < times:
                begin(num_struck)
                is_struck = strike_one(LANES[num_struck % 3], draw, aim)
                num_struck += is_struck
                num_missed = 0 if is_struck else num_missed + 1
                assert num_missed < MOST_MISSED, f"{num_missed} programs in a row met no interrupt"
    finally:
        signal.signal(signal.SIGINT, before)
    return num_struck


class Aim:
    """Takes SIGINT: an interrupt while a program runs, and nothing before and behind that, where a test would get it."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, *_: object) -> None:
        if self.is_on:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def sparing_unraisable_hook(self) -> Iterator[None]:
        """Meanwhile `sys.unraisablehook` is not interrupted: what a test's own notes there would be lost."""
        before = sys.unraisablehook

        def tell(unraisable: "sys.UnraisableHookArgs") -> None:
            was_on, self.is_on = self.is_on, False
            try:
                before(unraisable)
            finally:
                self.is_on = was_on

        sys.unraisablehook = tell
        try:
            yield
        finally:
            sys.unraisablehook = before


def strike_one(lanes: tuple[str, ...], draw: random.Random, aim: Aim) -> bool:
    """Interrupt a program, and check it; whether the interrupt met it."""
    program = Program(lanes, 40)
    after_s = [draw.uniform(1e-4, 4e-3), *draw.choice(([], [], [1e-3]))]
    may_begin, is_over = threading.Lock(), threading.Event()
    may_begin.acquire()
    main = threading.get_ident()
    striker = threading.Thread(target=strike, args=(main, after_s, may_begin, is_over))
    striker.start()
    is_struck = False
    try:
        aim.is_on = True
        may_begin.release()
        program.run()
    except KeyboardInterrupt:
        is_struck = True
    except EngineError:
        pass
    finally:
        # No call comes before this, and so no interrupt.
        aim.is_on = False
        is_over.set()
        striker.join()
    program.check()
    return is_struck


def strike(main: int, after_s: list[float], may_begin: Any, is_over: threading.Event) -> None:
    """Interrupt the main thread each of these times after the other, until it has ended."""
    may_begin.acquire()
    for time_s in after_s:
        if not is_over.wait(time_s):
            signal.pthread_kill(main, signal.SIGINT)


class Watch:
    """Says how far it is, and ends the process where a program does not come to its end."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._begun_s = time.monotonic()
        self._told = 0

    def begin(self, num_struck: int) -> None:
        """A program begins: it has until the deadline."""
        faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
        if num_struck - self._told >= _TOLD_EVERY:
            self._told = num_struck
            passed_s = time.monotonic() - self._begun_s
            sys.stderr.write(f"{num_struck} of {self._times} interrupts in {passed_s:.0f} s\n")
            sys.stderr.flush()


def main() -> int:
    """Interrupt as often as asked."""
    given = [int(word) for word in sys.argv[1:]]
    times, seed = [*given, *(1_000, 0)[len(given) :]]
    begun_s = time.monotonic()
    num_struck = interrupt(times, seed, Watch(times).begin)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(
        f"{num_struck} interrupts: all engines ended, in {time.monotonic() - begun_s:.0f} s\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
