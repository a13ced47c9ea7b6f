"""Two cores that write to one cache line: which cores, which samples count, and where it cannot be had."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.probe import native
from ridgeline.probe.host import false_sharing
from ridgeline.probe.host.false_sharing import (
    INCREMENTS,
    CountingSpan,
    measure_false_sharing,
    together,
)

SECONDS = st.floats(0.0, 1.0)


def siblings(system: Path, lists: dict[int, str]) -> Path:
    """Processors as the system describes them."""
    for core, text in lists.items():
        folder = system / "cpu" / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{text}\n")
    return system


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=5))
def test_only_rounds_in_which_both_counted_at_once_are_kept(
    spans: list[tuple[float, float, float, float]],
) -> None:
    """In each of them both did for nine tenths of the time in which either did; the slower one counts."""
    pairs = [
        (CountingSpan(min(a, b), max(a, b) + 0.01), CountingSpan(min(c, d), max(c, d) + 0.01))
        for a, b, c, d in spans
    ]
    together_s = [min(one.end, other.end) - max(one.begin, other.begin) for one, other in pairs]
    either_s = [max(one.end, other.end) - min(one.begin, other.begin) for one, other in pairs]
    is_kept = all(both >= 0.9 * whole for both, whole in zip(together_s, either_s, strict=True))
    slower = tuple(
        max(one.end - one.begin, other.end - other.begin) / INCREMENTS for one, other in pairs
    )
    assert together([pairs]) == ([slower] if is_kept else [])


def test_one_after_the_other_is_no_contention() -> None:
    """A thread that was interrupted counts alone, and as fast as if the line were its own."""
    at_once = (CountingSpan(0.0, 1.0), CountingSpan(0.05, 1.0))
    in_turn = (CountingSpan(0.0, 1.0), CountingSpan(1.0, 2.0))
    assert together([[at_once, at_once], [at_once, in_turn]]) == [(1.0 / INCREMENTS,) * 2]


@pytest.mark.parametrize(
    ("usable", "lists", "reason"),
    [
        ((0,), {}, "needs two cores, and this process may use one"),
        (
            (0, 1),
            {0: "0-1", 1: "0-1"},
            "needs two cores, and this process may use one, whose 2 threads share its caches",
        ),
    ],
)
def test_one_core_has_none(
    usable: tuple[int, ...],
    lists: dict[int, str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says so, and nothing is counted."""
    monkeypatch.setattr(false_sharing, "allowed", lambda: usable)
    monkeypatch.setattr(false_sharing, "_count", lambda _: pytest.fail("counted"))
    found = measure_false_sharing(siblings(tmp_path, lists))
    assert (found.reason, found.cores, found.counters, found.slowdowns) == (reason, (), (), ())


def test_a_system_that_does_not_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, two threads may run on one core."""
    monkeypatch.setattr(false_sharing, "may_pin", lambda: False)
    said = "this system does not let threads choose their cores"
    assert measure_false_sharing().reason == said


def made(
    monkeypatch: pytest.MonkeyPatch, rounds: Iterable[list[tuple[CountingSpan, CountingSpan]]]
) -> None:
    """Two cores whose threads took these spans, and a clock that advances by a second a look."""
    left, clock = iter(rounds), iter(range(1000))
    monkeypatch.setattr(false_sharing, "allowed", lambda: (2, 5))
    monkeypatch.setattr(false_sharing, "two_apart", lambda *_: (2, 5))
    monkeypatch.setattr(false_sharing, "_count", lambda _: [next(left)] * false_sharing.ROUNDS)
    monkeypatch.setattr(false_sharing.time, "monotonic", lambda: float(next(clock)))


def test_the_slowdown_is_that_within_a_line_over_that_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Round by round, for each distance beyond the line."""

    def both(seconds: float) -> tuple[CountingSpan, CountingSpan]:
        return CountingSpan(0.0, seconds), CountingSpan(0.0, seconds)

    made(monkeypatch, [[both(8.0), both(2.0), both(1.0)]] * 9)
    found = measure_false_sharing()
    assert found.cores == (2, 5)
    assert [one.distance_bytes for one in found.counters] == [8, 64, 128]
    seconds = [one.increment.value * INCREMENTS for one in found.counters]
    assert seconds == pytest.approx([8.0, 2.0, 1.0])
    assert [one.value for one in found.slowdowns] == pytest.approx([4.0, 8.0])
    assert {one.n for one in found.slowdowns} <= set(range(2, 102))
    assert found.reason == ""


def test_cores_that_others_use_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some seconds it gives up, and says what it has seen."""
    in_turn = (CountingSpan(0.0, 1.0), CountingSpan(1.0, 2.0))
    made(monkeypatch, [[in_turn] * 3] * 99)
    found = measure_false_sharing()
    assert found.cores == (2, 5)
    assert found.counters == ()
    assert found.reason == (
        "other programs used cores 2 and 5: both threads ran at once in 0 of 500 rounds"
    )


def test_a_thread_that_cannot_be_pinned_ends_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that was taken away meanwhile is an error, and not a thread that waits for ever."""
    usable = min(os.sched_getaffinity(0))
    before = {*threading.enumerate()}
    with pytest.raises((OSError, threading.BrokenBarrierError)):
        false_sharing._count((usable, 1 << 14))
    assert {*threading.enumerate()} <= before
    assert os.sched_getaffinity(0) >= {usable}


def test_counters_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, whose gate opens for itself: so many increments, and when they began and ended."""
    import ctypes

    words, span = (ctypes.c_uint64 * 64)(), (ctypes.c_double * 2)()
    address = ctypes.addressof(words)
    taken = native.library().ridgeline_count(address, address + 256, 1, 1000, span)
    assert (words[0], words[32], sum(words)) == (1000, 1, 1001)
    assert taken == span[1] - span[0] > 0.0
