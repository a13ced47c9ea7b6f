"""Who is absent, and how that is said, by the last words of all workers."""

import re
import sys

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import AbsentWorkerError, PlanError
from ridgeline.workers.attendance import Attendance
from ridgeline.workers.roll_call import LEFT, Row, absence_of, absence_text, absent, ranks_text

places = st.tuples(st.integers(0, 3), st.integers(0, 3))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Row, dict[int, Row], int]:
    size = draw(st.integers(2, 6))
    rows = {}
    for rank in range(size):
        rounds, calls = draw(places)
        rows[rank] = Row(rank=rank, rounds=rounds, calls=calls, doing="in step 1")
    return rows.pop(draw(st.integers(0, size - 1))), rows, size


@given(worlds())
def test_those_furthest_behind_are_absent(world: tuple[Row, dict[int, Row], int]) -> None:
    """Of workers that all run, those that nobody is behind, and nobody where all are as far."""
    mine, rows, size = world
    found = {absence.rank for absence in absent(mine, rows, range(size), {})}
    places = {rank: (row.rounds, row.calls) for rank, row in rows.items()}
    least = min(places.values())
    assert found == {
        r for r, place in places.items() if place == least and place < (mine.rounds, mine.calls)
    }


@given(worlds(), st.data())
def test_who_raised_is_the_cause(
    world: tuple[Row, dict[int, Row], int], data: st.DataObject
) -> None:
    """Whatever else is missing: the others may have stopped because of it. Then those that fell silent."""
    mine, rows, size = world
    rank = data.draw(st.sampled_from(sorted(rows)))
    silent = {other: "gone" for other in rows if other != rank}
    raised = Row(rank=rank, end="it raised X", has_raised=True)
    assert [a.rank for a in absent(mine, {**rows, rank: raised}, range(size), silent)] == [rank]
    assert [a.rank for a in absent(mine, rows, range(size), {rank: "gone"})] == [rank]
    del rows[rank]
    assert [a.rank for a in absent(mine, rows, range(size), {})] == [rank]


@given(worlds())
def test_who_waits_is_not_missing(world: tuple[Row, dict[int, Row], int]) -> None:
    """Workers that lost another one themselves did come, until they leave for it."""
    mine, rows, size = world
    waiting = {
        rank: Row(rank=rank, rounds=row.rounds, calls=row.calls, is_waiting=True)
        for rank, row in rows.items()
    }
    assert absent(mine, waiting, range(size), {}) == []
    rank = next(iter(waiting))
    waiting[rank] = Row(rank=rank, is_waiting=True, end="it left the process group")
    (absence,) = absent(mine, waiting, range(size), {})
    assert (absence.rank, absence.what) == (
        rank,
        "it had waited for other workers until its timeout, and left",
    )


@given(st.sets(st.integers(0, 40), min_size=1))
def test_ranks_are_told_in_runs(ranks: set[int]) -> None:
    """And every one of them, and no other."""
    found: set[int] = set()
    for part in re.findall(r"\d+ to \d+|\d+", ranks_text(sorted(ranks))):
        first, _, last = part.partition(" to ")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == ranks


def test_many_are_counted() -> None:
    """The message stays short where a whole host is lost."""
    rows = {
        rank: Row(
            rank=rank, rounds=3, completed={"step": 2}, doing="in step 3, forward", pid=7, host="h"
        )
        for rank in range(1, 16)
    }
    mine = Row(rank=0, rounds=3, calls=1, completed={"step": 2})
    text = absence_text("all_reduce/0 of step 3", mine, absent(mine, rows, range(16), {}), rows, 16)
    assert text == (
        "wanted all 16 workers in all_reduce/0 of step 3, got "
        + "; ".join(
            f"none from rank {r}: it runs (process 7 on h), in step 3, forward" for r in range(1, 5)
        )
        + "; and none from 11 more. Completed: 2 steps on ranks 0 to 15. See where it hangs: py-spy dump "
        "--pid 7"
    )


@pytest.mark.parametrize(
    ("error", "told", "is_cause"),
    [
        (None, LEFT, False),
        (PlanError("wanted workers >= 1, got -1"), "it raised PlanError: wanted workers >=", True),
        (AbsentWorkerError("wanted all 2 workers"), "it raised AbsentWorkerError: wanted", False),
        (RuntimeError("gloo/transport: reset"), "it raised RuntimeError: gloo/transport", False),
    ],
)
def test_what_ended_a_worker_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, told: str, is_cause: bool
) -> None:
    """An error of Ridgeline's between two steps is the cause, too; one about workers of another group is not."""
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    store = dist.HashStore()
    mine, other = Attendance(store, 0, range(2)), Attendance(store, 1, range(2))
    other.close()
    found = mine.others()[1]
    mine.close()
    assert found.end.startswith(told)
    assert found.has_raised == is_cause
    advice = absence_of(1, found, "").advice
    assert advice.startswith("give every" if error is None else "see the traceback of rank 1")
