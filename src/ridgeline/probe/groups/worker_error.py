"""How a worker of a process group failed: who was first, and what it printed last."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.codec import write_atomically
from ridgeline.errors import LaunchError, RidgelineError
from ridgeline.host.signal_names import signal_name

TAIL_LINES = 12
_TAIL = "; its last output:\n"


class Raised(NamedTuple):
    """What a worker's function raised: when (nanoseconds of the monotonic clock), its type and message."""

    at_ns: int
    kind: str
    message: str

    def save(self, directory: Path, rank: int) -> None:
        """Leave it where the parent of the workers looks for it."""
        write_atomically(directory / f"failed.{rank}", msgspec.json.encode(self))

    @classmethod
    def load(cls, directory: Path, rank: int) -> "Raised":
        """What a rank left; of one that was killed, which could leave nothing, that it went first."""
        path = directory / f"failed.{rank}"
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls(0, "", "")


NOTHING = Raised(0, "", "")


class WorkerError(LaunchError):
    """A worker failed, was killed, or was ended for being late.

    Attributes:
        rank: Which one was first.
        how: In a few words.
        signal: The signal that ended it; 0 where it ended by itself or was late.
        is_late: It was ended because the deadline had passed.
        last_line: The last line that it printed; empty where there is none.
        raised: What its function raised; empty strings where it did not.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        how: str,
        signal: int = 0,
        is_late: bool = False,
        last_line: str = "",
        raised: Raised = NOTHING,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.how = how
        self.signal = signal
        self.is_late = is_late
        self.last_line = last_line
        self.raised = raised


def failure(target: str, workers: int, codes: Mapping[int, int], directory: Path) -> WorkerError:
    """Of the rank that failed first, out of the exit codes of those that failed."""
    rank = _first_to_fail(codes, directory)
    code = codes[rank]
    how = f"signal {-code} ({signal_name(-code)})" if code < 0 else f"exit code {code}"
    advice = "correct the error above, or try with one worker"
    # What the system ends for want of memory gets this signal.
    if -code == signal.SIGKILL:
        advice = "the system may be out of memory; use fewer workers or a smaller batch"
    lines = _tail(directory, rank)
    return WorkerError(
        f"wanted {workers} workers to finish {target}, got {how} from rank {rank} of {workers}{_TAIL}"
        f"{_shown(lines)}\n{advice}",
        rank=rank,
        how=how,
        signal=max(0, -code),
        last_line=_last(lines),
        raised=Raised.load(directory, rank),
    )


def lateness(
    target: str, workers: int, rank: int, deadline_s: float, directory: Path
) -> WorkerError:
    """Of a rank that had not ended when the deadline passed."""
    within = f"within {units.seconds(deadline_s)}"
    lines = _tail(directory, rank)
    return WorkerError(
        f"wanted {workers} workers to finish {target} {within}, got no end from rank {rank} of {workers}"
        f"{_TAIL}{_shown(lines)}\ngive a longer deadline, or less work",
        rank=rank,
        how=f"no end {within}",
        is_late=True,
        last_line=_last(lines),
    )


def standstill(target: str, workers: int, rank: int, directory: Path) -> WorkerError:
    """Of a rank that makes no progress."""
    lines = _tail(directory, rank)
    return WorkerError(
        f"wanted progress in {target}, got none from rank {rank} of {workers}{_TAIL}{_shown(lines)}\n"
        "leave out what it hangs in",
        rank=rank,
        how="it hangs",
        last_line=_last(lines),
    )


def in_one_line(error: RidgelineError) -> str:
    """What an error says, for a note: of a worker's output only the last line."""
    if not isinstance(error, WorkerError):
        return " ".join(str(error).split())
    head = str(error).partition(_TAIL)[0]
    return f"{head}: {error.last_line}" if error.last_line else head


def _first_to_fail(codes: Mapping[int, int], directory: Path) -> int:
    """The rank that failed first: the others mostly fail because a peer is gone."""
    return min(codes, key=lambda rank: (Raised.load(directory, rank).at_ns, rank))


def _tail(directory: Path, rank: int) -> list[str]:
    path = directory / f"output.{rank}"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return lines[-TAIL_LINES:]


def _last(lines: list[str]) -> str:
    return lines[-1].strip() if lines else ""


def _shown(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines) or "  (none)"
