"""The range in which a repeated measurement lies."""

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import LawError
from ridgeline.laws.repeats import (
    FLOOR,
    SHARE,
    common_drift,
    relative_drift,
    repeat_range,
)

amounts = st.floats(1e-9, 1e15)
visits = st.lists(amounts, min_size=1, max_size=6)
drifts = st.floats(0.0, 2.0)


@given(visits, drifts)
def test_a_range_holds_the_median_and_what_three_digits_do_not_show(
    medians: list[float], common: float
) -> None:
    """Nothing is below 0, and the range reaches as far down as up where it can."""
    middle = statistics.median(medians)
    low, high = repeat_range(middle, medians, common)
    assert 0.0 <= low <= middle * (1.0 - FLOOR) * (1.0 + 1e-12)
    assert high >= middle * (1.0 + FLOOR) * (1.0 - 1e-12)
    assert low == pytest.approx(max(0.0, 2.0 * middle - high), abs=1e-9 * high)


@given(visits, drifts, st.floats(1e-6, 1e6))
def test_a_range_does_not_depend_on_the_unit(
    medians: list[float], common: float, factor: float
) -> None:
    """All multiplied by a factor, the range is, too."""
    middle = statistics.median(medians)
    low, high = repeat_range(middle, medians, common)
    scaled = repeat_range(factor * middle, [factor * median for median in medians], common)
    assert scaled.high == pytest.approx(factor * high, rel=1e-6)
    assert scaled.low == pytest.approx(factor * low, rel=1e-6, abs=1e-6 * factor * high)


@given(amounts, st.floats(0.0, 0.3), st.floats(0.0, 0.3), drifts, drifts)
def test_a_range_widens_with_drift(
    middle: float, less: float, more: float, one: float, other: float
) -> None:
    """With that of its own visits, and with what all numbers of the run have in common."""
    less, more = sorted((less, more))
    one, other = sorted((one, other))

    def reach(own: float, common: float) -> float:
        around = [middle * (1.0 - own), middle, middle * (1.0 + own)]
        return repeat_range(middle, around, common).high

    assert reach(less, one) <= reach(more, one) * (1.0 + 1e-12)
    assert reach(less, one) <= reach(less, other) * (1.0 + 1e-12)


@pytest.mark.parametrize(("count", "shared"), [(3, 0.0), (3, 0.03), (4, 0.03), (6, 0.1)])
def test_ranges_hold_as_many_repeated_measurements_as_they_say(count: int, shared: float) -> None:
    """Also where part of the drift outlasts a run, which sees nothing of that; not where most of it does.

    Numbers drift by 5 % from visit to visit, and by `shared` from run to run.
    """
    noise = random.Random(count)
    runs = []
    for _ in range(60):
        numbers = []
        for _ in range(50):
            middle = noise.gauss(1.0, shared)
            numbers.append([middle * noise.gauss(1.0, 0.05) for _ in range(count)])
        found = [relative_drift(medians) for medians in numbers]
        common = common_drift([drift for drift in found if drift is not None], count)
        assert common == pytest.approx(0.05, rel=0.5)
        runs.append(
            [
                (statistics.median(m), *repeat_range(statistics.median(m), m, common))
                for m in numbers
            ]
        )
    within = [
        low <= middle <= high
        for one, other in itertools.pairwise(runs)
        for (_, low, high), (middle, _, _) in zip(one, other, strict=True)
    ]
    if shared <= 0.03:
        assert statistics.fmean(within) >= SHARE
    else:
        assert 0.5 < statistics.fmean(within) < SHARE


def test_drift_in_common_is_that_of_a_usual_number() -> None:
    """One number that jumped does not count, and without numbers there is none."""
    assert common_drift([0.01, 0.02, 5.0], 3) == pytest.approx(0.02 / 0.838, rel=1e-3)
    assert common_drift([], 3) == 0.0
    assert relative_drift([4.0]) is None
    assert relative_drift([0.0, 0.0]) is None
    assert relative_drift([1.0, 3.0]) == pytest.approx(2.0**0.5 / 2.0)


def test_what_makes_no_range_is_refused() -> None:
    """Negative numbers, and one visit that should tell of drift."""
    with pytest.raises(LawError, match=r"wanted a finite median >= 0, got -1; "):
        repeat_range(-1.0, [1.0], 0.1)
    with pytest.raises(LawError, match=r"wanted a finite common drift >= 0, got -0\.1; "):
        repeat_range(1.0, [1.0], -0.1)
    with pytest.raises(LawError, match=r"wanted a finite number of visits >= 2, got 1; "):
        common_drift([0.1], 1)
