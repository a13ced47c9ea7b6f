"""What one access to memory costs, and what reading in order does, by the size of what is walked through.

Small sets stay in the caches near the core, larger ones in those behind, and the largest in main memory: the
times make a staircase whose steps are the levels.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from ridgeline.machine import Quantity
from ridgeline.machine.stairs import WORD_BYTES
from ridgeline.probe.host.processors import line_of
from ridgeline.probe.native import library

LINE_BYTES = 64
"""A cache line of x86 and most ARM processors: what memory moves at once."""
SAMPLES = 7
SAMPLE_S = 0.01
"""Least length of a sample: a thousand times what the clock resolves."""
SHORT_S = 0.002
"""Alike, of samples that are many: where others use the host, most of them are not interrupted."""
LEAST_HOPS = 1 << 12
MOST_WARMING = 1 << 22
"""Loads before the first sample: a walk through 256 MiB."""

Run = Callable[[int], float]
"""Seconds of a loop that runs so often."""
Sample = Callable[[], float]


class Mapped:
    """So many bytes of memory of their own.

    At least 8; the system is asked for large pages, or to give none.

    Cost: none until they are written.
    """

    def __init__(self, num_bytes: int, *, large_pages: bool = True) -> None:
        # Private, since shared memory gets no large pages. Without them most of what is timed beyond a few
        # MiB is the search for addresses.
        self._memory = mmap.mmap(
            -1, max(num_bytes, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        advice = getattr(mmap, "MADV_HUGEPAGE" if large_pages else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            with contextlib.suppress(OSError):  # a kernel without them has no such advice
                self._memory.madvise(advice)
        self.words = np.frombuffer(self._memory, np.uint64)
        self.address = self.words.ctypes.data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back."""
        # numpy's view would keep the mapping open.
        del self.words
        self._memory.close()

    @property
    def large_page_bytes(self) -> int | None:
        """How much of this process lies in large pages; None where the system does not tell."""
        words = line_of(Path("/proc/self/smaps_rollup"), "AnonHugePages:").split()
        return int(words[0]) << 10 if words else None


class Walked(Mapped):
    """So many bytes of memory of their own, with a random walk through all of their lines.

    At least two lines. A walk `like` another one of the same size is laid sooner.

    Cost: allocates them, and as much again while the walk is laid.
    """

    def __init__(
        self,
        num_bytes: int,
        seed: int = 0,
        *,
        large_pages: bool = True,
        like: "Walked | None" = None,
    ) -> None:
        super().__init__(num_bytes, large_pages=large_pages)
        self.num_lines = num_bytes // LINE_BYTES
        if like is None:
            self._lay(seed)
        else:
            self._copy(like)

    def _lay(self, seed: int) -> None:
        """In the first word of each line the address of the next one: one circle through all."""
        # A random order, which no prefetcher follows.
        order = np.random.default_rng(seed).permutation(self.num_lines).astype(np.uint64)
        addresses = order * np.uint64(LINE_BYTES) + np.uint64(self.address)
        places = (order * np.uint64(LINE_BYTES // WORD_BYTES)).astype(np.int64)
        self.words[places] = np.roll(addresses, -1)
        self._at = ctypes.c_void_p(int(addresses[0]))

    def _copy(self, other: "Walked") -> None:
        self.words[:] = other.words
        # Addresses are absolute, so each is moved by how far the copies are apart.
        distance = self.address - other.address
        self.words[:: LINE_BYTES // WORD_BYTES] += np.uint64(distance % (1 << 64))
        self._at = ctypes.c_void_p(self.address)  # each line is in the circle

    def access(self) -> Quantity:
        """Seconds of a load that waits for the one before it, somewhere in these bytes."""
        return _sampled(self.timed_access())

    def timed_access(self, sample_s: float = SAMPLE_S) -> Sample:
        """The same, one sample of at least that many seconds per call; the caches are warm."""
        chase = library().ridgeline_chase

        def run(hops: int) -> float:
            return chase(ctypes.byref(self._at), hops)

        # Once through all, so that the walk is in the level that it fits.
        run(min(_whole(self.num_lines), MOST_WARMING))
        hops = enough(run, LEAST_HOPS, sample_s)
        return lambda: run(hops) / hops

    def word(self) -> Quantity:
        """Seconds a word of 8 bytes where all are read in order."""
        return _sampled(self.timed_word())

    def timed_word(self) -> Sample:
        """The same, one sample a call."""
        count = self.num_lines * (LINE_BYTES // WORD_BYTES)
        return _timed(count, lambda repeats: library().ridgeline_read(self.address, count, repeats))

    def line(self) -> Quantity:
        """Seconds a word where one of every line is read, in order, none waiting for another."""
        stride, count = LINE_BYTES // WORD_BYTES, self.num_lines
        read = library().ridgeline_stride
        return _sampled(_timed(count, lambda repeats: read(self.address, count, stride, repeats)))


def _timed(count: int, run: Run) -> Sample:
    repeats = enough(run, 1)
    return lambda: run(repeats) / (repeats * count)


def _sampled(sample: Sample) -> Quantity:
    return Quantity.measured([sample() for _ in range(SAMPLES)], "s")


def _whole(hops: int) -> int:
    """Rounded up to what the loop does at once."""
    return -(-hops // 16) * 16


def enough(run: Run, least: int, sample_s: float = SAMPLE_S) -> int:
    """How often for a sample that is long enough; the calls before it warm the caches."""
    count = least
    while run(count) < sample_s:
        count *= 2
    return count
