"""Blocks that threads move between memory and a file, one after another each, and the times of all."""

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ridgeline.machine.quantity import Quantity
from ridgeline.probe.host.memory_levels import Mapped

LARGE_PAGE_BYTES = 2 << 20
NUM_RATES = 10
"""Samples of a rate, each of as many blocks, in the order in which they were there."""

Act = Callable[[memoryview, int], object]
"""Moves a block between memory and a place in the file, in bytes from its beginning."""
Step = Callable[[memoryview, Sequence[int], float], list[float]]
"""Moves blocks one after another, for some seconds but at least one; begin, end, begin, end of each."""


class BlockSpan(NamedTuple):
    """When a block began to be moved and when it was there, in seconds of one clock."""

    begun_s: float
    ended_s: float


@contextlib.contextmanager
def pages(num_bytes: int) -> Iterator[memoryview]:
    """Memory that begins at a page, as direct I/O wants it, and lies in large pages where there are any.

    A transfer to pages that lie apart has a part for each, and drives take only so many parts at once: on a
    virtual machine of two cores 1 MiB at a time was read with 1.3 GB/s into small pages, with 2.4 into large.
    """
    with Mapped(num_bytes + LARGE_PAGE_BYTES) as memory:
        start = -memory.address % LARGE_PAGE_BYTES
        # Memory that is referred to cannot be given back, so both views end before.
        with memory.words.data.cast("B") as whole, whole[start : start + num_bytes] as part:
            yield part


def one_by_one(act: Act) -> Step:
    """A step of one act in Python for each place."""

    def step(memory: memoryview, places: Sequence[int], limit_s: float) -> list[float]:
        times: list[float] = []
        end_s = time.perf_counter() + limit_s
        for place in places:
            begun_s = time.perf_counter()
            # The first block is moved however late it is, so that every thread has a time.
            if times and begun_s > end_s:
                break
            act(memory, place)
            times += begun_s, time.perf_counter()
        return times

    return step


def moved(
    step: Step,
    places: Sequence[Iterable[int]],
    num_bytes: int,
    *,
    limit_s: float = math.inf,
    batch: int = 1,
) -> list[BlockSpan]:
    """The times of blocks that threads move, each one block after another, in the order of their ends.

    Args:
        step: See `Step`.
        places: For each thread, where its blocks are.
        num_bytes: Of a block.
        limit_s: No block begins later, but every thread's first.
        batch: Places that are given to a step at once; an interrupt waits for so many blocks.

    Raises:
        OSError: as `step` does; the other threads end with their blocks.
    """
    times: list[float] = []
    failures: list[BaseException] = []
    stop = threading.Event()
    end_s = time.perf_counter() + limit_s

    def work(mine: Iterable[int]) -> None:
        try:
            left = iter(mine)
            with pages(num_bytes) as memory:
                while (some := list(itertools.islice(left, batch))) and not stop.is_set():
                    # One operation to the interpreter, so begin and end of a block stay side by side.
                    times.extend(step(memory, some, end_s - time.perf_counter()))
                    if time.perf_counter() > end_s:
                        return
        except BaseException as error:  # noqa: BLE001 - raised again where the threads were started
            failures.append(error)
            stop.set()

    # In this thread, as starting one would be in the first block's time.
    if len(places) == 1:
        work(places[0])
    else:
        _run([threading.Thread(target=work, args=(mine,)) for mine in places], stop)
    for failure in failures:
        raise failure
    spans = map(BlockSpan, times[::2], times[1::2])
    return sorted(spans, key=lambda span: span.ended_s)


def _run(threads: Sequence[threading.Thread], stop: threading.Event) -> None:
    """Wait until all have ended; on an interrupt they are asked to stop, and end with their present block."""
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        for thread in threads:
            # One that an interrupt caught at its start sees the stop before it touches anything.
            with contextlib.suppress(RuntimeError):
                thread.join()


def seconds_of(spans: Sequence[BlockSpan]) -> Quantity:
    """What a block took, from its beginning to its end."""
    return Quantity.measured([span.ended_s - span.begun_s for span in spans], "s")


def rate_of(spans: Sequence[BlockSpan], num_bytes: int) -> Quantity:
    """Bytes per second of all threads together, one sample for each tenth of the blocks.

    Spans are of blocks of `num_bytes`, in the order of their ends; at least one.
    """
    # A tenth begins where the one before ended, so that pauses between blocks count.
    at_s = min(span.begun_s for span in spans)
    bounds = sorted({len(spans) * part // NUM_RATES for part in range(NUM_RATES + 1)})
    rates = []
    for first, last in itertools.pairwise(bounds):
        ended_s = spans[last - 1].ended_s
        rates.append((last - first) * num_bytes / max(ended_s - at_s, 1e-9))
        at_s = ended_s
    return Quantity.measured(rates, "B/s")
