"""Workers hold a case together: one count of runs, the slowest worker's time, one verdict."""

import msgspec
import pytest
from held_together import SLOW_S
from rows import row_of

from ridgeline.experiments.ways.result import WayCase
from ridgeline.probe.groups.group import run_in_group

Seen = tuple[WayCase, dict[str, int]]


@pytest.fixture(scope="module")
def seen() -> list[Seen]:
    """What each of two workers has of the case in `held_together.py`."""
    reply = run_in_group("held_together:held", b"", workers=2, threads=1, device="cpu")
    return msgspec.json.decode(reply, type=list[Seen])


def test_all_run_alike(seen: list[Seen]) -> None:
    """As often, and with the same figures."""
    (first, runs), (second, others) = seen
    assert runs == others
    assert (first.calls, first.turns) == (second.calls, second.turns)
    for mine, theirs in zip(first.rows, second.rows, strict=True):
        assert (mine.name, mine.status, mine.seconds) == (
            theirs.name,
            theirs.status,
            theirs.seconds,
        )


def test_the_slowest_worker_counts(seen: list[Seen]) -> None:
    """A worker that waits for nobody is as slow as the one that it would wait for."""
    for case, _ in seen:
        assert row_of(case, "slow on 1").seconds.value == SLOW_S
        assert row_of(case, "same").seconds.value == SLOW_S / 4
        assert row_of(case, "other on 1").seconds.value == SLOW_S / 16


def test_results_of_all_are_compared(seen: list[Seen]) -> None:
    """The largest difference of any worker is told by all."""
    for case, _ in seen:
        assert row_of(case, "other on 1").difference == 1.0
        assert row_of(case, "same").difference == 0.0


def test_what_fails_on_one_fails_on_all(seen: list[Seen]) -> None:
    """With its reason there, and a word for it elsewhere; nobody waits for it."""
    elsewhere = "RuntimeError: it failed on another worker"
    for way, reasons in {
        "late on 1": (elsewhere, "ValueError: no more"),
        "not on 0": ("ValueError: not here", elsewhere),
    }.items():
        for (case, _), reason in zip(seen, reasons, strict=True):
            assert (row_of(case, way).status, row_of(case, way).reason) == ("failed", reason)
