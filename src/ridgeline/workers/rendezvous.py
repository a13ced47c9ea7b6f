"""Rendezvous: workers meet at the store before they do something together that one might be alone with.

A collective that some call and others do not meets whatever the others call next: gloo then ends the process,
or all wait. At the store a worker sees that the others went on without it.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping

import msgspec

from ridgeline.errors import AbsentWorkerError
from ridgeline.workers import attendance
from ridgeline.workers.attendance import GONE, Attendance
from ridgeline.workers.roll_call import Row, absence_of, absence_text
from ridgeline.workers.world import World

POLL_S = 0.02


@contextlib.contextmanager
def rendezvous(call: str, world: World, *, are_apart: bool = False) -> Iterator[None]:
    """All workers have come to `call`, e.g. `step.verdict()`, and are in it inside.

    Args:
        call: What each of them has to call.
        world: Who has to come.
        are_apart: Workers may be steps apart, so that one which is ahead may still come.

    Raises:
        AbsentWorkerError: a worker went on, ended, or did not come within the time-out of the group.

    Cost: A few messages to the store; waits for the last worker. Nothing for a worker alone.
    """
    present = attendance.of(world)
    if present is None:
        yield
        return
    # Counted before the round: who has begun that round and not counted this has gone past it.
    present.num_rendezvous += 1
    with present.phase(call):
        _wait(present, call, world.timeout_s, are_apart=are_apart)
        yield


def _wait(present: Attendance, call: str, limit_s: float, *, are_apart: bool) -> None:
    present.publish()
    end_s = time.monotonic() + limit_s
    while True:
        try:
            mine, rows = present.row(), present.others()
        except RuntimeError:
            return  # the store is gone, of which the collectives inside say more
        missing = {
            rank: rows.get(rank)
            for rank in present.ranks
            if rank != mine.rank and not _has_come(rows.get(rank), mine)
        }
        if not missing:
            return
        silent = {r: GONE for r, row in missing.items() if row and present.is_gone(row)}
        is_over = time.monotonic() > end_s
        lost = {
            rank: row
            for rank, row in missing.items()
            if is_over or rank in silent or _went_on(row, mine, are_apart=are_apart)
        }
        if lost:
            raise AbsentWorkerError(_text(call, mine, rows, lost, silent, len(present.ranks)))
        time.sleep(POLL_S)


def _has_come(row: Row | None, mine: Row) -> bool:
    return row is not None and row.num_rendezvous >= mine.num_rendezvous


def _went_on(row: Row | None, mine: Row, *, are_apart: bool) -> bool:
    """Whether a worker that has not come will not: it ended, or has begun what is behind this."""
    return row is not None and (bool(row.end) or (row.rounds >= mine.rounds and not are_apart))


def _text(
    call: str,
    mine: Row,
    rows: Mapping[int, Row],
    lost: Mapping[int, Row | None],
    silent: Mapping[int, str],
    size: int,
) -> str:
    absences = [absence_of(rank, row, silent.get(rank, "")) for rank, row in lost.items()]
    advice = f"call {call} on all workers, and print what it gives on one"
    told = [
        absence
        if absence.is_silent or (row is not None and row.has_raised)
        else msgspec.structs.replace(absence, advice=advice)
        for absence, row in zip(absences, lost.values(), strict=True)
    ]
    return absence_text(call, mine, told, rows, size)
