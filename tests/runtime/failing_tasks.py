"""Tasks of an engine that fail, in flat memory.

    python tests/runtime/failing_tasks.py [TASKS]

pushes TASKS (1,000,000) that raise: some that nobody waits for, some whose variable is waited for, deleted or cleared,
some that have another one skipped since it reads what has failed, on lanes of one thread and of several. Says every
tenth of them how much memory is held; ends with status 1 where it has grown, or where a failure is not accounted for.
`test_engine_limits.py` has a few thousand.
"""

import gc
import sys
import time
from contextlib import suppress
from typing import NamedTuple

import psutil

from ridgeline.engine import Engine
from ridgeline.errors import EngineError

LANES = ("loader", "host", "disk", "compute")
PARTS = 10
MOST_GROWTH_BYTES = 16 << 20
"""Between the end of the second part, when the engine keeps as many spans as it ever does, and that of the last."""


class Counts(NamedTuple):
    """What became of tasks, and how much memory was held after each part.

    `raising` and `reading` are how many were pushed that raise, and that read what such a task has written.
    """

    raising: int
    reading: int
    failed: int
    skipped: int
    pending: int
    held_bytes: list[int]

    @property
    def are_right(self) -> bool:
        """Whether each task is accounted for."""
        return (self.failed, self.skipped, self.pending) == (self.raising, self.reading, 0)


def fail() -> None:
    """What a task does here."""
    kept = bytearray(1 << 12)
    raise ValueError(f"broken, with {len(kept)} bytes in its frame")


def push_some(engine: Engine, number: int) -> int:
    """Push a failing task, with what goes with it in its turn; how many tasks read what it writes."""
    variable, lane = engine.variable(), LANES[number // 4 % len(LANES)]
    engine.push(fail, writes=(variable,) if number % 4 else (), lane=lane)
    num_readers = 0
    if number % 4 == 1:
        with suppress(EngineError):
            engine.wait(variable)
    if number % 4 == 2:
        engine.push(fail, reads=(variable,), lane=lane)
        engine.clear_error(variable)
        num_readers = 1
    engine.delete(variable)
    return num_readers


def run(tasks: int) -> Counts:
    """Have as many tasks fail."""
    process, held, reading = psutil.Process(), list[int](), 0
    with Engine(threads={"disk": 3}, max_pending=256) as engine:
        for part in range(PARTS):
            for number in range(tasks * part // PARTS, tasks * (part + 1) // PARTS):
                reading += push_some(engine, number)
            with suppress(EngineError):  # tells of what nobody waited for
                engine.wait_all()
            gc.collect()
            held.append(process.memory_info().rss)
        told = engine.statistics()
    return Counts(tasks, reading, told.failed, told.skipped, told.pending, held)


def main() -> int:
    """Have as many tasks fail as asked, and say what it took."""
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    begun_s = time.monotonic()
    counts = run(tasks)
    shown = " ".join(f"{held / 2**20:.1f}" for held in counts.held_bytes)
    grown = counts.held_bytes[-1] - counts.held_bytes[1]
    sys.stdout.write(
        f"{counts.failed} of {counts.raising} tasks failed, {counts.skipped} of {counts.reading} were skipped; MiB after "
        f"each tenth: {shown}; {time.monotonic() - begun_s:.0f} s\n"
    )
    return int(grown > MOST_GROWTH_BYTES or not counts.are_right)


if __name__ == "__main__":
    sys.exit(main())
