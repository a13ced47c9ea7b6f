"""Who did not come to a collective, decided from what the workers say of themselves; pure functions.

Every worker counts the steps (and other rounds) that it has begun, and the collectives in the present one.
These are the same on all workers in the same order, so the worker furthest behind is waited for.
"""

import re
from collections.abc import Collection, Mapping, Sequence

from ridgeline import units
from ridgeline.codec import Value


class Row(Value, frozen=True, kw_only=True):
    """What a worker says of itself.

    `rounds` and `calls` are its place: rounds begun, and collectives begun in the present round;
    `num_rendezvous` are those begun. `completed` are the steps that ended, by the name of their `TrainStep`.
    `end` says how it stopped, empty until then. `is_waiting` says that it lost others itself. `serial` grows
    with every word.
    """

    rank: int
    rounds: int = 0
    calls: int = 0
    num_rendezvous: int = 0
    completed: dict[str, int] = {}
    doing: str = ""
    end: str = ""
    has_raised: bool = False
    is_waiting: bool = False
    serial: int = 0
    pid: int = 0
    host: str = ""

    @property
    def is_inside(self) -> bool:
        """Whether it is in a step, or in a call that all workers make."""
        return self.doing.startswith(_INSIDE)


class Absence(Value, frozen=True, kw_only=True):
    """One worker that is waited for: what is known of it, and what to do; its last word may be old."""

    rank: int
    what: str
    advice: str
    is_silent: bool = False


SAME_STEPS = "make the same steps on all workers"
_INSIDE = "in "
_STEP = re.compile(r"step \d+")
LEFT = "it left the process group"
_BATCHES = (
    "give every worker as many batches (a DistributedSampler, drop_last=True, or a common number of "
    "steps)"
)


def absent(
    mine: Row,
    rows: Mapping[int, Row],
    ranks: Collection[int],
    silent: Mapping[int, str],
    named: Collection[int] | None = None,
) -> list[Absence]:
    """The workers for which `mine` waits, in order; empty where all stand where it stands.

    Those that raised an error of their own are reported alone, being the cause of all else; then those that
    ended or fell silent; then those furthest behind, which others may wait for that are behind themselves.

    `rows` are the last words of workers, by rank; `silent` ranks give no answer any more, with how that
    shows. `named` are those that a server of a store waits for, whose workers may be steps apart: then these
    are absent, or those that are silent.
    """
    others = [rank for rank in ranks if rank != mine.rank]
    raised = [r for r in others if r in rows and rows[r].has_raised]
    if raised:
        return [absence_of(rank, rows[rank], "") for rank in raised]
    if named is not None:
        missing = [r for r in others if r in (named or silent)]
        return [absence_of(rank, rows.get(rank), silent.get(rank, "")) for rank in missing]
    waiting = [r for r in others if r in rows and rows[r].is_waiting]
    # One that ended ahead of this worker had come to all that it waits for.
    gone = [
        r
        for r in others
        if r not in waiting
        and (r not in rows or r in silent or (rows[r].end and _place(rows[r]) <= _place(mine)))
    ]
    if gone:
        return [absence_of(rank, rows.get(rank), silent.get(rank, "")) for rank in gone]
    places = {r: _place(rows[r]) for r in others if r not in waiting}
    least = min(places.values(), default=_place(mine))
    behind = [r for r, place in places.items() if place == least < _place(mine)]
    # As many rounds, and of something else: each waits for the other, and both may have given up.
    elsewhere = [r for r in others if r in rows and _is_elsewhere(rows[r], mine)]
    if elsewhere and not behind:
        return [absence_of(rank, rows[rank], "", others_are=mine.doing) for rank in elsewhere]
    # Those that gave up come last: whatever they had waited for is the cause, if it is known.
    behind = behind or [r for r in waiting if rows[r].end or r in silent]
    return [absence_of(rank, rows[rank], "") for rank in behind]


def absence_text(
    what: str, mine: Row, absences: Sequence[Absence], rows: Mapping[int, Row], size: int
) -> str:
    """The message for a worker that waited in vain."""
    got = "; ".join(f"none from rank {a.rank}: {a.what}" for a in absences[:4])
    if len(absences) > 4:
        got += f"; and none from {len(absences) - 4} more"
    advice = "; ".join(dict.fromkeys(a.advice for a in absences))
    lost = {a.rank for a in absences if a.is_silent}
    counts = _counts({**rows, mine.rank: mine}, lost)
    return (
        f"wanted all {size} workers in {what}, got {got}. Completed: {counts}. "
        f"{advice[:1].upper()}{advice[1:]}"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0 to 2 and 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    joined = " and ".join(([", ".join(words[:-1])] if words[:-1] else []) + words[-1:])
    return f"rank{'s' * (len(ranks) > 1)} {joined}"


def _place(row: Row) -> tuple[int, int]:
    return row.rounds, row.calls


def is_ahead(row: Row, mine: Row) -> bool:
    """Whether a worker left in good order, having begun all that this one has, which is in nothing."""
    has_left = bool(row.end) and not row.has_raised and not row.is_waiting
    return has_left and not mine.is_inside and _place(row) >= _place(mine)


def _is_elsewhere(row: Row, mine: Row) -> bool:
    """Whether both are inside of something in the same round, and not of the same."""
    if row.rounds != mine.rounds or not (row.is_inside and mine.is_inside):
        return False
    # Steps by their name: one that skipped a batch has another number in the same round.
    return _STEP.sub("step", row.doing.split(",")[0]) != _STEP.sub("step", mine.doing.split(",")[0])


def absence_of(rank: int, row: Row | None, silence: str, others_are: str = "") -> Absence:
    """What is known of a worker that did not come, by its last word, and of its silence, if it is."""
    if row is None:
        what = "it made no TrainStep"
        return Absence(rank=rank, what=what, advice=SAME_STEPS)
    where = f"process {row.pid} on {row.host}"
    if row.has_raised:
        return Absence(rank=rank, what=row.end, advice=f"see the traceback of rank {rank}")
    if silence:
        return Absence(
            rank=rank,
            what=f"{silence} ({where}; last heard {row.doing})",
            advice=f"see its log, its exit status, and whether {row.host} ran out of memory",
            is_silent=True,
        )
    if others_are:
        what = f"it was {row.doing}" if row.end else f"it runs ({where}), {row.doing}"
        advice = f"make the same calls in the same order on all workers: this one is {others_are}"
        return Absence(rank=rank, what=what, advice=advice)
    if row.is_waiting:
        what = "it had waited for other workers until its timeout, and left"
        advice = "see its message, or raise the timeout of the process group"
        return Absence(rank=rank, what=what, advice=advice)
    if row.end:
        advice = _BATCHES if row.end == LEFT else f"see the traceback of rank {rank}"
        return Absence(rank=rank, what=row.end, advice=advice)
    what, look = f"it runs ({where}), {row.doing}", f"py-spy dump --pid {row.pid}"
    if row.is_inside:
        return Absence(rank=rank, what=what, advice=f"see where it hangs: {look}")
    return Absence(rank=rank, what=what, advice=f"{_BATCHES}, or see what it does: {look}")


def without_store(error: str) -> Absence:
    """What is known where nobody's word can be read; `error` is of the store."""
    return Absence(
        rank=0,
        what=f"the store of the process group, which it or its launcher keeps, is gone ({error})",
        advice="see the log of rank 0 and of the launcher",
    )


def _counts(rows: Mapping[int, Row], lost: Collection[int]) -> str:
    """Completed steps, ranks with equal counts together; those that were lost may have completed more."""
    alike: dict[str, list[int]] = {}
    for rank, row in sorted(rows.items()):
        parts = [
            f"{units.counted(count, 'step')}{f' of {name!r}' * (len(row.completed) > 1)}"
            for name, count in row.completed.items()
        ]
        text = ("at least " if rank in lost else "") + (", ".join(parts) or "no step")
        alike.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in alike.items())
