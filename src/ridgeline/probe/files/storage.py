"""A file that is written and read to time storage, past the system's cache of files where that can be."""

import contextlib
import ctypes
import errno
import itertools
import math
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ridgeline.closing import Closing
from ridgeline.errors import MachineError
from ridgeline.probe.files.blocks import BlockSpan, moved, one_by_one, pages
from ridgeline.probe.native import storage_library

BLOCK_BYTES, PIECE_BYTES = 4 << 10, 1 << 20
NUM_PIECES = 16
"""Different ones, written over and over. What goes through the cache is synced after this many."""
NUM_PLACES = 1 << 15
"""At random, for each thread, before they come again."""
BATCH = 64
"""Blocks that the compiled loop reads at once: of a slow drive no more than a second's."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
"""What file systems say that allow no direct I/O. Source: open(2), `O_DIRECT`."""


class Scratch(Closing):
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
        self.num_bytes = 0
        self.is_compiled = _can_compile()
        with contextlib.ExitStack() as stack:
            # In the folder itself, since another one may be on another drive.
            self._cached, name = tempfile.mkstemp(dir=folder, prefix=".storage-")
            stack.callback(os.close, self._cached)
            self._noise = stack.enter_context(pages(NUM_PIECES * PIECE_BYTES))
            try:
                self._direct = _direct(name)
            finally:
                # Open files live on without a name, and go with the process.
                Path(name).unlink()
            if self._direct is not None:
                stack.callback(os.close, self._direct)
            self._stack = stack.pop_all()
        # Noise, as drives and file systems that compress would otherwise store next to nothing.
        self._noise[:] = random.Random(0).randbytes(NUM_PIECES * PIECE_BYTES)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go past the system's cache of files; what is appended never does."""
        return self._direct is not None

    def close(self) -> None:
        """Give the file's room back."""
        self._stack.close()

    def write(self, num_bytes: int, limit_s: float = math.inf) -> list[BlockSpan]:
        """Write the file in order, a piece at a time, until it has `num_bytes` or the time is over.

        Where that goes through the cache, every sixteenth piece takes all before it to the drive.
        """

        def act(memory: memoryview, place: int) -> None:
            self._write(self._file, place, PIECE_BYTES)
            if not self.is_direct and place // PIECE_BYTES % NUM_PIECES == NUM_PIECES - 1:
                os.fsync(self._cached)

        places = range(0, num_bytes, PIECE_BYTES)
        spans = moved(one_by_one(act), [places], PIECE_BYTES, limit_s=limit_s)
        self.num_bytes = len(spans) * PIECE_BYTES
        # Also of direct writes: drives have a cache of their own.
        os.fsync(self._cached)
        return spans

    def append(self, most: int, limit_s: float = math.inf) -> list[BlockSpan]:
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
    ) -> list[BlockSpan]:
        """Read pieces in order, from the beginning again after the last; thread by thread at most so many."""
        pieces = self.num_bytes // PIECE_BYTES
        places = [
            (
                number % pieces * PIECE_BYTES
                # Threads read pieces in turns, as a reader of that depth does, not a part of the file each.
                for number in itertools.islice(itertools.count(first, depth), most)
            )
            for first in range(depth)
        ]
        return self._moved(places, PIECE_BYTES, limit_s, batch=1)

    def read_at_random(
        self, depth: int = 1, limit_s: float = math.inf, most: int | None = None
    ) -> list[BlockSpan]:
        """Read blocks at random; thread by thread at most so many."""
        places = [itertools.islice(self._at_random(seed), most) for seed in range(depth)]
        return self._moved(places, BLOCK_BYTES, limit_s, batch=BATCH)

    @property
    def _file(self) -> int:
        return self._cached if self._direct is None else self._direct

    def _moved(
        self, places: Sequence[Iterator[int]], num_bytes: int, limit_s: float, batch: int
    ) -> list[BlockSpan]:
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
            # Opening may succeed where only the first transfer is refused.
            os.pwrite(file, memory, 0)
    except BaseException as error:
        if file is not None:
            os.close(file)
        if isinstance(error, OSError) and error.errno in _REFUSED:
            return None
        raise
    return file


def shown(folder: Path) -> str:
    """A folder below the user's own without the user's name: results are shared."""
    try:
        home = Path.home()
    except RuntimeError:  # a user whom the system gives none
        return str(folder)
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)
