"""Rendezvous: workers meet at the store before they do something together that one might be alone with.

A collective that some call and others do not meets whatever the others call next: gloo then ends the process,
or all wait. At the store those that come are counted, and a worker sees that others went on without it.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping

import msgspec

from ridgeline.errors import AbsentWorkerError
from ridgeline.workers import attendance, telling
from ridgeline.workers.attendance import EVERY_S, Attendance
from ridgeline.workers.roll_call import Row, absence_of, absence_text
from ridgeline.workers.world import World

POLL_S = 0.02
Rows = Mapping[int, Row]


@contextlib.contextmanager
def rendezvous(call: str, advice: str, world: World) -> Iterator[None]:
    """All workers have come to `call`, e.g. `step.verdict()`, and are in it inside.

    Args:
        call: What each of them has to call.
        advice: What to do about one that does not.
        world: Who has to come.

    Raises:
        AbsentWorkerError: a worker went on, ended, or did not come within the time-out of the group.

    Cost: A few messages to the store; waits for the last worker. Nothing for a worker alone, and where all
        are in something together already.
    """
    present = attendance.of(world)
    if present is None or present.phases:
        yield
        return
    # Counted before the round: who has begun that round and not counted this has gone past it.
    present.num_rendezvous += 1
    with present.phase(call):
        _wait(present, call, advice, world.timeout_s)
        yield


def _wait(present: Attendance, call: str, advice: str, limit_s: float) -> None:
    """Wait for all; their number tells of many workers at little cost, their words are read now and then."""
    present.publish()
    begin_s = look_s = time.monotonic()
    before: Rows = {}
    try:
        num_come = _come(present, 1)
        while num_come < len(present.ranks):
            time.sleep(POLL_S)
            if (now_s := time.monotonic()) > look_s:
                look_s = now_s + EVERY_S
                before = _check(present, call, advice, before, is_over=now_s > begin_s + limit_s)
            num_come = _come(present, 0)
    except AbsentWorkerError:
        _come(present, -1)
        present.num_rendezvous -= 1
        raise
    except RuntimeError:
        return  # the store is gone, of which the collectives inside say more
    present.count_alike()


def _come(present: Attendance, times: int) -> int:
    """Count this worker at the rendezvous that it is at; how many are there."""
    key = f"ridgeline/rendezvous/{present.group}/{present.num_rendezvous}"
    return present.store.add(key, times)


def _check(present: Attendance, call: str, advice: str, before: Rows, *, is_over: bool) -> Rows:
    """What the others say; an AbsentWorkerError where some will not come."""
    mine, rows = present.row(), present.others()
    missing = {
        rank: rows.get(rank)
        for rank in present.ranks
        if rank != mine.rank and not _has_come(rows.get(rank), mine)
    }
    silent = {r: telling.GONE for r, row in missing.items() if row and telling.is_gone(row)}
    lost = {
        rank: row
        for rank, row in missing.items()
        if is_over
        or rank in silent
        or (not present.are_apart and _went_on(row, before.get(rank), mine))
    }
    if lost:
        size = len(present.ranks)
        raise AbsentWorkerError(_text(call, advice, mine, rows, lost, silent, size))
    return rows


def _has_come(row: Row | None, mine: Row) -> bool:
    return row is not None and row.num_rendezvous >= mine.num_rendezvous


def _went_on(row: Row | None, before: Row | None, mine: Row) -> bool:
    """Whether a worker waits in what is behind this: it is still where it was a look before.

    One that ended its step, by an error, too, may come yet: scripts catch errors, and begin again.
    """
    if row is None or before is None or row.rounds < mine.rounds or not row.is_inside:
        return False
    return (row.rounds, row.calls) == (before.rounds, before.calls)


def _text(
    call: str,
    advice: str,
    mine: Row,
    rows: Mapping[int, Row],
    lost: Mapping[int, Row | None],
    silent: Mapping[int, str],
    size: int,
) -> str:
    absences = [absence_of(rank, row, silent.get(rank, "")) for rank, row in lost.items()]
    told = [
        absence
        if absence.is_silent or (row is not None and row.has_raised)
        else msgspec.structs.replace(absence, advice=advice)
        for absence, row in zip(absences, lost.values(), strict=True)
    ]
    return absence_text(call, mine, told, rows, size)
