"""A file that is written and read to time storage, past the system's cache of files where that can be."""

import contextlib
import ctypes
import errno
import itertools
import math
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ridgeline.errors import MachineError
from ridgeline.probe.native import storage_library
from ridgeline.quantity import Quantity

BLOCK_BYTES, PIECE_BYTES = 4 << 10, 1 << 20
LARGE_PAGE_BYTES = 2 << 20
NUM_PIECES = 16
"""Different ones, written over and over. What goes through the cache is synced after as many."""
NUM_PLACES = 1 << 15
"""At random, for each thread, before they come again."""
BATCH = 64
"""Blocks that the compiled loop reads at once: of a slow drive no more than a second's."""
NUM_RATES = 10
"""Samples of a rate, each of as many blocks, in the order in which they were there."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
"""What file systems say that allow no direct I/O. Source: open(2), `O_DIRECT`."""

Act = Callable[[memoryview, int], object]
"""Moves a block between memory and a place in the file, in bytes from its beginning."""
Step = Callable[[memoryview, Sequence[int], float], list[float]]
"""Moves blocks one after another, for so many seconds but at least one; begin, end, begin, end of each."""


class Span(NamedTuple):
    """When a block began to be moved and when it was there, in seconds of one clock."""

    begun_s: float
    ended_s: float


class Scratch:
    """A file of noise in a directory, to which no name leads: it goes with its process, however that ends.

    Args:
        folder: Where; its drive is what is timed.

    Attributes:
        is_direct: Reads and writes go past the system's cache of files.
        num_bytes: How much was written.
        is_compiled: Reads are issued by a loop in C; without a compiler by Python, whose threads wait for
            each other where there are many blocks a second.

    Raises:
        OSError: no file can be made there, or its first block not be written.
    """

    def __init__(self, folder: Path) -> None:
        self._cached, name = tempfile.mkstemp(dir=folder, prefix=".storage-")
        self._direct: int | None = None
        self._stack = contextlib.ExitStack()
        self._noise = self._stack.enter_context(pages(NUM_PIECES * PIECE_BYTES))
        self.num_bytes = 0
        self.is_compiled = _can_compile()
        try:
            try:
                self._direct = _direct(name)
            finally:
                Path(name).unlink()
        except BaseException:
            self.close()
            raise
        # Noise, as drives and file systems that compress would otherwise store next to nothing.
        self._noise[:] = random.Random(0).randbytes(NUM_PIECES * PIECE_BYTES)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the system's cache of files; what is appended never does."""
        return self._direct is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the file's room back."""
        self._stack.close()
        for file in (self._cached, self._direct):
            if file is not None:
                os.close(file)

    def write(self, num_bytes: int, limit_s: float = math.inf) -> list[Span]:
        """Write the file in order, a piece at a time, until it has so many bytes or the time is over.

        Where that goes through the cache, every sixteenth piece takes all before it to the drive.
        """

        def act(memory: memoryview, place: int) -> None:
            number = place // PIECE_BYTES
            self._write(self._file, place, PIECE_BYTES)
            if not self.is_direct and number % NUM_PIECES == NUM_PIECES - 1:
                os.fsync(self._cached)

        places = range(0, num_bytes, PIECE_BYTES)
        spans = moved(one_by_one(act), [places], PIECE_BYTES, limit_s=limit_s)
        self.num_bytes = len(spans) * PIECE_BYTES
        os.fsync(self._cached)
        return spans

    def append(self, most: int, limit_s: float = math.inf) -> list[Span]:
        """Append at most so many blocks through the cache, as programs do, each with an fsync behind it.

        Each takes the file system's own books to the drive, too, as the file grows.
        """

        def act(memory: memoryview, place: int) -> None:
            self._write(self._cached, place, BLOCK_BYTES)
            os.fsync(self._cached)

        places = range(self.num_bytes, self.num_bytes + most * BLOCK_BYTES, BLOCK_BYTES)
        return moved(one_by_one(act), [places], BLOCK_BYTES, limit_s=limit_s)

    def read(
        self, depth: int = 1, limit_s: float = math.inf, most: int | None = None
    ) -> list[Span]:
        """Read pieces in order, from the beginning again after the last; thread by thread at most so many."""
        pieces = self.num_bytes // PIECE_BYTES
        places = [
            (
                number % pieces * PIECE_BYTES
                for number in itertools.islice(itertools.count(first, depth), most)
            )
            for first in range(depth)
        ]
        return self._moved(places, PIECE_BYTES, limit_s, batch=1)

    def read_at_random(
        self, depth: int = 1, limit_s: float = math.inf, most: int | None = None
    ) -> list[Span]:
        """Read blocks at random; thread by thread at most so many."""
        places = [itertools.islice(self._at_random(seed), most) for seed in range(depth)]
        return self._moved(places, BLOCK_BYTES, limit_s, batch=BATCH)

    @property
    def _file(self) -> int:
        return self._cached if self._direct is None else self._direct

    def _moved(
        self, places: Sequence[Iterator[int]], num_bytes: int, limit_s: float, batch: int
    ) -> list[Span]:
        if self.is_compiled:
            return moved(self._read_compiled, places, num_bytes, limit_s=limit_s, batch=batch)
        return moved(one_by_one(self._read), places, num_bytes, limit_s=limit_s)

    def _read(self, memory: memoryview, place: int) -> None:
        if os.preadv(self._file, [memory], place) != len(memory):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _read_compiled(
        self, memory: memoryview, places: Sequence[int], limit_s: float
    ) -> list[float]:
        count = len(places)
        given, times = (ctypes.c_int64 * count)(*places), (ctypes.c_double * (2 * count))()
        block = ctypes.c_char.from_buffer(memory)
        done = storage_library().ridgeline_read_blocks(
            self._file, ctypes.addressof(block), len(memory), given, count, limit_s, times
        )
        del block  # memory that is referred to cannot be given back
        if done < 0:
            raise OSError(-done, os.strerror(-done))
        return times[: 2 * done]

    def _at_random(self, seed: int) -> Iterator[int]:
        """Places of blocks without end, made ahead: making one takes as long as reading it from memory."""
        blocks = range(0, self.num_bytes, BLOCK_BYTES)
        return itertools.cycle(random.Random(seed).choices(blocks, k=NUM_PLACES))

    def _write(self, file: int, place: int, num_bytes: int) -> None:
        start = place % len(self._noise)
        with self._noise[start : start + num_bytes] as part:
            if os.pwrite(file, part, place) != num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _can_compile() -> bool:
    try:
        storage_library()
    except MachineError:
        return False
    return True


def _direct(name: str) -> int | None:
    """The file, opened for direct I/O; None where the system or the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    file = None
    try:
        file = os.open(name, os.O_RDWR | os.O_DIRECT)
        with pages(BLOCK_BYTES) as memory:
            os.pwrite(file, memory, 0)
    except BaseException as error:
        if file is not None:
            os.close(file)
        if isinstance(error, OSError) and error.errno in _REFUSED:
            return None
        raise
    return file


@contextlib.contextmanager
def pages(num_bytes: int) -> Iterator[memoryview]:
    """Memory that begins at a page, as direct I/O wants it, and lies in large pages where there are any.

    A transfer to pages that lie apart has a part for each, and drives take only so many parts at once: on a
    virtual machine of two cores 1 MiB at a time was read with 1.3 GB/s into small pages, with 2.4 into large.
    """
    with mmap.mmap(
        -1, num_bytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    ) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without large pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.c_char.from_buffer(memory)
        start = -ctypes.addressof(first) % LARGE_PAGE_BYTES
        del first  # memory that is referred to cannot be given back
        with memoryview(memory) as whole, whole[start : start + num_bytes] as part:
            yield part


def one_by_one(act: Act) -> Step:
    """A step of one act in Python for each place."""

    def step(memory: memoryview, places: Sequence[int], limit_s: float) -> list[float]:
        times: list[float] = []
        end_s = time.perf_counter() + limit_s
        for place in places:
            begun_s = time.perf_counter()
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
) -> list[Span]:
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
                    times.extend(step(memory, some, end_s - time.perf_counter()))
                    if time.perf_counter() > end_s:
                        return
        except BaseException as error:  # noqa: BLE001 - raised again where the threads were started
            failures.append(error)
            stop.set()

    if len(places) == 1:
        work(places[0])
    else:
        _run([threading.Thread(target=work, args=(mine,)) for mine in places], stop)
    for failure in failures:
        raise failure
    spans = map(Span, times[::2], times[1::2])
    return sorted(spans, key=lambda span: span.ended_s)


def _run(threads: Sequence[threading.Thread], stop: threading.Event) -> None:
    """Until all have ended; where somebody interrupts, they are told to stop and end with their blocks."""
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


def seconds_of(spans: Sequence[Span]) -> Quantity:
    """What a block took, from its beginning to its end."""
    return Quantity.measured([span.ended_s - span.begun_s for span in spans], "s")


def rate_of(spans: Sequence[Span], num_bytes: int) -> Quantity:
    """Bytes per second of all threads together, one sample for each tenth of the blocks.

    Args:
        spans: In the order of their ends; at least one.
        num_bytes: Of a block.
    """
    at_s = min(span.begun_s for span in spans)
    bounds = sorted({len(spans) * part // NUM_RATES for part in range(NUM_RATES + 1)})
    rates = []
    for first, last in itertools.pairwise(bounds):
        ended_s = spans[last - 1].ended_s
        rates.append((last - first) * num_bytes / max(ended_s - at_s, 1e-9))
        at_s = ended_s
    return Quantity.measured(rates, "B/s")


def shown(folder: Path) -> str:
    """A folder below the user's own without the user's name: results are shared."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)
