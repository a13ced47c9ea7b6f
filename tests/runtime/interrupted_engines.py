"""Ctrl-C at random times while an engine works.

    python tests/runtime/interrupted_engines.py [INTERRUPTS] [SEED]

interrupts programs INTERRUPTS times (1,000), and says how many engines ended, which ran no task twice and kept the
order of what ran; an engine that does not end hangs. `test_engine_interrupts.py` does the same.
"""

import contextlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
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


def interrupt(times: int, seed: int) -> int:
    """Interrupt programs, and check each; how many interrupts met one.

    Raises:
        AssertionError: an engine did not end as it should.
    """
    draw = random.Random(seed)
    num_struck = 0
    while num_struck < times:
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
    return num_struck


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


def main() -> int:
    """Interrupt as often as asked."""
    given = [int(word) for word in sys.argv[1:]]
    times, seed = [*given, *(1_000, 0)[len(given) :]]
    begun_s = time.monotonic()
    num_struck = interrupt(times, seed)
    sys.stdout.write(
        f"{num_struck} interrupts: all engines ended, in {time.monotonic() - begun_s:.0f} s\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
