"""Reads from storage, past the system's cache of files."""

import errno
import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ridgeline import units
from ridgeline.experiments.memory.result import Latency
from ridgeline.machine import Quantity

BLOCK_BYTES, PIECE_BYTES = 4 << 10, 1 << 20
RANDOM = "read of 4 KiB from storage, at random"
IN_ORDER = "read of 1 MiB from storage, in order"
TEXTBOOK_S = {RANDOM: 120e-6, IN_ORDER: 208e-6}
"""Of an NVMe drive. Source: Dive into Deep Learning, 12.4."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


def storage_latencies(folder: Path, num_bytes: int, num_reads: int) -> list[Latency]:
    """Direct reads of a file that is made for it, and deleted.

    Args:
        folder: Where; its drive is what is timed.
        num_bytes: Of the file: several MiB.
        num_reads: Of each kind.

    Returns:
        With a reason instead of figures where the file system allows no direct reads, or has no room.
    """
    if not hasattr(os, "O_DIRECT"):
        return _not_held("this system has no direct I/O")
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix="storage-")
    os.close(handle)
    try:
        return _timed(Path(name), num_bytes, num_reads)
    except OSError as error:
        if error.errno in _REFUSED:
            return _not_held(f"the file system of {folder} allows no direct I/O")
        if error.errno == errno.ENOSPC:
            return _not_held(f"{folder} has no room for {units.num_bytes(num_bytes)}")
        raise
    finally:
        Path(name).unlink(missing_ok=True)


def _timed(path: Path, num_bytes: int, num_reads: int) -> list[Latency]:
    # Direct I/O takes memory that begins at a page.
    with mmap.mmap(-1, PIECE_BYTES) as memory:
        pieces = num_bytes // PIECE_BYTES
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
        try:
            noise = random.Random(0)
            for number in range(pieces):
                memory[:] = noise.randbytes(PIECE_BYTES)  # zeros might not be stored at all
                os.pwrite(file, memory, number * PIECE_BYTES)
            os.fsync(file)
            blocks = num_bytes // BLOCK_BYTES
            places = [noise.randrange(blocks) * BLOCK_BYTES for _ in range(num_reads)]
            view = memoryview(memory)
            with view, view[:BLOCK_BYTES] as block:
                at_random = _reads(lambda place: os.preadv(file, [block], place), places)
                order = [(number % pieces) * PIECE_BYTES for number in range(num_reads)]
                in_order = _reads(lambda place: os.preadv(file, [view], place), order)
        finally:
            os.close(file)
    how = f"direct, one after another, of {units.num_bytes(num_bytes)} in {_shown(path.parent)}"
    return [
        Latency(name=name, textbook_s=TEXTBOOK_S[name], measured=measured, how=how)
        for name, measured in ((RANDOM, at_random), (IN_ORDER, in_order))
    ]


def _shown(folder: Path) -> str:
    """A folder below the user's own without the user's name: results are shared."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _reads(read: Callable[[int], int], places: list[int]) -> Quantity:
    samples = []
    for place in places:
        begun = time.perf_counter()
        read(place)
        samples.append(time.perf_counter() - begun)
    return Quantity.measured(samples, "s")


def _not_held(reason: str) -> list[Latency]:
    return [
        Latency(name=name, textbook_s=textbook_s, reason=reason)
        for name, textbook_s in TEXTBOOK_S.items()
    ]
