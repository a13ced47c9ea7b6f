"""Reports of copies: the arithmetic of what was hidden."""

import random

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.feeding.channel import HostChannel
from ridgeline.feeding.meter import Meter, Trace
from ridgeline.feeding.report import bounding_stage, covered_s, hidden_share

points = st.integers(0, 60)
intervals = st.lists(st.tuples(points, points).map(lambda p: (min(p), max(p))), max_size=12)


@given(intervals, intervals)
def test_covered_is_the_measure_of_the_intersection(
    inner: list[tuple[int, int]], outer: list[tuple[int, int]]
) -> None:
    """Counted unit by unit; overlapping computation does not hide a copy twice."""
    wanted = sum(
        any(begin <= unit < end for begin, end in outer)
        for first, last in inner
        for unit in range(first, last)
    )
    assert covered_s(inner, outer) == wanted


def test_nothing_to_hide_is_no_share() -> None:
    """And noise stays within 0 and 1."""
    assert hidden_share(covered=0.0, total=0.0) is None
    assert hidden_share(covered=-1.0, total=2.0) == 0.0
    assert hidden_share(covered=3.0, total=2.0) == 1.0
    assert hidden_share(covered=1.0, total=4.0) == 0.25


def test_the_longest_stage_bounds() -> None:
    """Whatever took most seconds sets the pace."""
    assert bounding_stage(loading_s=0, copy_s=0, compute_s=0) == "nothing"
    assert bounding_stage(loading_s=3, copy_s=2, compute_s=1) == "loader"
    assert bounding_stage(loading_s=1, copy_s=2, compute_s=1) == "copy"
    assert bounding_stage(loading_s=1, copy_s=2, compute_s=2) == "compute"


@given(st.integers(0, 300), st.integers(0, 3), st.randoms(use_true_random=False))
def test_windows_neither_lose_nor_repeat_a_batch(
    length: int, ahead: int, rng: random.Random
) -> None:
    """A copy may run during the computation of any batch up to `ahead` before its own, or after it."""
    traces = []
    for index in range(length):
        begin = 10 * index + rng.randint(0, 3)
        copy_begin = 10 * (index - ahead) + rng.randint(0, 15)
        traces.append(
            Trace((copy_begin, copy_begin + rng.randint(0, 4)), (begin, begin + rng.randint(0, 7)))
        )
    meter = Meter(HostChannel(), ahead + 2)
    for trace in traces:
        meter.add(trace)
    copies, computes = [t.copy for t in traces if t.copy], [t.compute for t in traces]
    assert meter.totals() == (
        sum(end - begin for begin, end in copies),
        sum(end - begin for begin, end in computes),
        covered_s(copies, computes),
    )
    assert meter.totals() == meter.totals()
