"""What a measuring worker is about to do, in a file that outlives it.

A kernel that asserts, or an operator that never returns, takes the worker with it. The journal says which
one it was, so that the parent can measure the others; what was found before is kept beside it.
"""

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple, Self

_ENTRY = struct.Struct("<Qii")
_NOTHING = -1
DIRECTORY = "RIDGELINE_GROUP_SCRATCH"
"""Environment variable of a worker: where its journal is. Without it none is kept."""
HANG_S = 30.0
"""An operator that takes longer than this hangs: all that a first call prepares takes less."""


class OperatorEntry(NamedTuple):
    """Which op of which trace of the step is being issued; `count` distinguishes entries."""

    count: int
    variant: int
    op: int


class ProbeJournal:
    """Writes the journal of one worker; as a context it says at the end that nothing is being issued.

    `variant` says which trace is replayed: 0 for the workload itself, then its variants.
    """

    def __init__(self, path: Path, variant: int) -> None:
        self._variant = variant
        self._count = 0
        path.touch()
        with path.open("r+b") as file:
            file.truncate(_ENTRY.size)
            # Mapped memory reaches the file even where the process is killed at the next instruction.
            self._memory = mmap.mmap(file.fileno(), _ENTRY.size)

    def note(self, op: int) -> None:
        """An op is about to be issued. Cost: under a microsecond."""
        self._count += 1
        _ENTRY.pack_into(self._memory, 0, self._count, self._variant, op)

    def __enter__(self) -> Self:
        self.note(_NOTHING)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Otherwise the entry stays: it names what the worker died in.
        if error is None:
            self.note(_NOTHING)
        self._memory.close()


class Reader:
    """The journals of a group of workers, as its parent reads them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: dict[int, tuple[int, float]] = {}

    def entry(self, rank: int) -> OperatorEntry | None:
        """The op that a worker issues or died in; None where it is in none."""
        path = journal_path(self._directory, rank)
        data = path.read_bytes() if path.exists() else b""
        if len(data) < _ENTRY.size:
            return None
        entry = OperatorEntry(*_ENTRY.unpack(data[: _ENTRY.size]))
        return entry if entry.op >= 0 else None

    def any_entry(self, workers: int) -> OperatorEntry | None:
        """The op of the first worker that is in one."""
        return next(filter(None, map(self.entry, range(workers))), None)

    def hanging(self, workers: int, *, after_s: float) -> int | None:
        """The first worker that has been in one op for that long; to be asked again and again."""
        now = time.monotonic()
        for rank in range(workers):
            entry = self.entry(rank)
            if entry is None:
                self._seen.pop(rank, None)
                continue
            count, since = self._seen.get(rank, (-1, now))
            # By its count, since one operator is issued again and again.
            if count != entry.count:
                self._seen[rank] = (entry.count, now)
            elif now - since > after_s:
                return rank
        return None


def journal_path(directory: Path, rank: int) -> Path:
    """Where the journal of a worker is."""
    return directory / f"journal.{rank}"


def partial_path(directory: Path) -> Path:
    """Where rank 0 keeps what it has found so far."""
    return directory / "partial"


def fault_path(directory: Path, rank: int) -> Path:
    """Where a worker writes what an operator did to its GPU."""
    return directory / f"fault.{rank}"


def scratch() -> Path | None:
    """The directory in which this worker keeps its journal; None where nobody asked for one."""
    name = os.environ.get(DIRECTORY)
    return Path(name) if name else None
