"""What one access to memory costs, and what reading in order does, by the size of what is walked through.

Small sets stay in the caches near the core, larger ones in those behind, and the largest in main memory: the
times make a staircase whose steps are the levels.
"""

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from ridgeline.machine import Quantity
from ridgeline.probe.native import library
from ridgeline.stairs import WORD_BYTES

LINE_BYTES = 64
"""A cache line of x86 and most ARM processors: what memory moves at once."""
SAMPLES = 7
SAMPLE_S = 0.01
"""Least length of a sample: a thousand times what the clock resolves."""
LEAST_HOPS = 1 << 12
MOST_WARMING = 1 << 22
"""Loads before the first sample: a walk through 256 MiB."""

Run = Callable[[int], float]


class Walked:
    """So many bytes of memory of their own, with a random walk through all of their lines.

    Args:
        num_bytes: At least two lines.
        seed: Of the walk.

    Cost: allocates them, and as much again while the walk is laid.
    """

    def __init__(self, num_bytes: int, seed: int = 0) -> None:
        self.num_lines = num_bytes // LINE_BYTES
        # Private, since shared memory gets no large pages. Without them most of what is timed beyond a few
        # MiB is the search for addresses.
        self._memory = mmap.mmap(
            -1, max(num_bytes, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = np.frombuffer(self._memory, np.uint64)
        self.address = self._words.ctypes.data
        self._lay(seed)

    def _lay(self, seed: int) -> None:
        """In the first word of each line the address of the next one: one circle through all."""
        order = np.random.default_rng(seed).permutation(self.num_lines).astype(np.uint64)
        addresses = order * np.uint64(LINE_BYTES) + np.uint64(self.address)
        places = (order * np.uint64(LINE_BYTES // WORD_BYTES)).astype(np.int64)
        self._words[places] = np.roll(addresses, -1)
        self._at = ctypes.c_void_p(int(addresses[0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back."""
        del self._words
        self._memory.close()

    @property
    def large_page_bytes(self) -> int | None:
        """How much of this process lies in large pages; None where the system does not tell."""
        try:
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        except OSError:
            return None
        found = (line.split()[1] for line in lines if line.startswith("AnonHugePages:"))
        return next((int(kib) << 10 for kib in found), None)

    def access(self) -> Quantity:
        """Seconds of a load that waits for the one before it, somewhere in these bytes."""
        chase = library().ridgeline_chase

        def run(hops: int) -> float:
            return chase(ctypes.byref(self._at), hops)

        run(min(_whole(self.num_lines), MOST_WARMING))
        hops = _enough(run, LEAST_HOPS)
        return Quantity.measured([run(hops) / hops for _ in range(SAMPLES)], "s")

    def word(self) -> Quantity:
        """Seconds a word of 8 bytes where all are read in order."""
        count = self.num_lines * (LINE_BYTES // WORD_BYTES)
        return self._read(
            count, lambda repeats: library().ridgeline_read(self.address, count, repeats)
        )

    def line(self) -> Quantity:
        """Seconds a word where one of every line is read, in order, none waiting for another."""
        stride, count = LINE_BYTES // WORD_BYTES, self.num_lines
        read = library().ridgeline_stride
        return self._read(count, lambda repeats: read(self.address, count, stride, repeats))

    def _read(self, count: int, run: Run) -> Quantity:
        repeats = _enough(run, 1)
        return Quantity.measured([run(repeats) / (repeats * count) for _ in range(SAMPLES)], "s")


def _whole(hops: int) -> int:
    """Rounded up to what the loop does at once."""
    return -(-hops // 16) * 16


def _enough(run: Run, least: int) -> int:
    """How often for a sample that is long enough; the calls before it warm the caches."""
    count = least
    while run(count) < SAMPLE_S:
        count *= 2
    return count
