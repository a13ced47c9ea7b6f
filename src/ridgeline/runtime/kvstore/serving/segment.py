"""Memory that a worker and a server of one host share: tensors go through it, messages say where they lie.

The worker makes it as a file in memory, the server opens it by name, and then the name is taken away: nothing
is left of it however a process ends.
"""

import mmap
import os
import re
import secrets
from pathlib import Path
from typing import Self

from ridgeline.errors import KVStoreError

SHARED_FILES = Path("/dev/shm")
VARIABLE = "RIDGELINE_KVSTORE_SHARED"
"""`0` in the environment of a worker: its tensors go through sockets on one host, too."""
_NAME = re.compile(r"ridgeline-[0-9a-f]{32}")


_ALIGNED = 4096
"""Bytes that places are a multiple of: pages, so that elements of all types are aligned."""


class SharedPlaces:
    """Places in memory for a few tensors at once, each as large as it is wanted.

    Args:
        num_bytes: Of the memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._taken: dict[int, int] = {}

    def take(self, num_bytes: int) -> int | None:
        """Where so many bytes may lie from now on, the first such place; None where there is none.

        Cost: Looks at all places that are taken.
        """
        start, wanted = 0, -(-num_bytes // _ALIGNED) * _ALIGNED
        # The first gap that fits: places live as long as a call, so that gaps close by themselves.
        for begin, end in sorted(self._taken.items()):
            if begin - start >= wanted:
                break
            start = end
        if start + wanted > self._num_bytes:
            return None
        self._taken[start] = start + wanted
        return start

    def give(self, start: int) -> None:
        """A place that was taken is free."""
        del self._taken[start]


class Segment:
    """Shared memory.

    Args:
        memory: Mapped.
        name: Of its file, while it has one.

    Attributes:
        view: The memory.
    """

    def __init__(self, memory: mmap.mmap, name: str) -> None:
        self.view = memoryview(memory)
        self.name = name

    @classmethod
    def make(cls, num_bytes: int) -> Self:
        """New memory, which is there in full.

        Raises:
            OSError: the system has no such files, or no room for this one, or the user wants none.
        """
        if os.environ.get(VARIABLE) == "0":
            raise OSError(f"{VARIABLE}=0 in the environment")
        # A random name that nobody else could have made, with O_EXCL below for who tries.
        name = f"ridgeline-{secrets.token_hex(16)}"
        handle = os.open(SHARED_FILES / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserved: a page that is missing later would end the process.
            os.posix_fallocate(handle, 0, num_bytes)
            return cls(mmap.mmap(handle, num_bytes), name)
        except OSError:
            (SHARED_FILES / name).unlink()
            raise
        finally:
            os.close(handle)

    @classmethod
    def open(cls, name: str) -> Self:
        """What another process has made.

        Raises:
            KVStoreError: there is none of that name, or nothing in it.
        """
        if not _NAME.fullmatch(name):
            raise KVStoreError(f"wanted the name of shared memory, got {name[:64]!r}")
        try:
            # Links are not followed: names come from others.
            handle = os.open(SHARED_FILES / name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            raise KVStoreError(f"wanted shared memory {name}, got {error.strerror}") from error
        try:
            return cls(mmap.mmap(handle, os.fstat(handle).st_size), name)
        except (OSError, ValueError) as error:  # of an empty file
            raise KVStoreError(f"wanted shared memory {name}, got {error}") from error
        finally:
            os.close(handle)

    def part(self, start: int, num_bytes: int) -> memoryview:
        """Some of the memory.

        Raises:
            KVStoreError: it is not within.
        """
        if start < 0 or num_bytes < 0 or start + num_bytes > len(self.view):
            raise KVStoreError(
                f"wanted bytes within {len(self.view)} of shared memory, got {num_bytes} from {start} on"
            )
        return self.view[start : start + num_bytes]

    def forget_name(self) -> None:
        """Take the file away; processes that have it keep the memory."""
        (SHARED_FILES / self.name).unlink(missing_ok=True)
