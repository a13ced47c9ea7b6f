"""Fits by Gustafson's law, and how sure fitted laws are."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import laws
from ridgeline.errors import LawError

COUNTS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]


@given(st.floats(0.0, 0.9), st.floats(0.1, 1e6))
def test_fit_gustafson_recovers_its_own_points(serial: float, rate: float) -> None:
    """Points of the law give back the law."""
    fit = laws.fit_gustafson(COUNTS, [rate * laws.gustafson(serial, n) for n in COUNTS])
    assert fit.serial_fraction == pytest.approx(serial, abs=1e-9)
    assert fit.rate == pytest.approx(rate, rel=1e-9)
    assert fit.max_error < 1e-9


@pytest.mark.parametrize(
    ("throughputs", "serial"), [([1.0, 2.5, 6.0], 0.0), ([3.0, 2.0, 1.0], 1.0)]
)
def test_a_serial_part_is_a_share(throughputs: list[float], serial: float) -> None:
    """More speed-up than workers, or less than one: still between 0 and 1, with the rate that fits best."""
    fit = laws.fit_gustafson([1, 2, 4], throughputs)
    assert fit.serial_fraction == serial

    def misses(rate: float) -> float:
        pairs = zip([1, 2, 4], throughputs, strict=True)
        return sum((rate * laws.gustafson(serial, n) / value - 1.0) ** 2 for n, value in pairs)

    assert misses(fit.rate) <= min(misses(fit.rate * 1.01), misses(fit.rate * 0.99))


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Of 60 sets of noisy points of one law, 90 % intervals hold the serial part in 48 or more."""
    spread, serial, noise = 0.02, 0.08, random.Random(0)
    covered = 0
    for seed in range(60):
        rates = [laws.amdahl(1 - serial, n) * math.exp(noise.gauss(0.0, spread)) for n in COUNTS]
        spreads = [spread] * len(COUNTS)
        fits = laws.resampled(laws.fit_amdahl, COUNTS, rates, spreads, draws=40, seed=seed)
        low, high = laws.interval([fit.serial_fraction for fit in fits])
        covered += low <= serial <= high
    assert 48 <= covered < 60


def test_few_misses_tell_little_of_how_far_points_scatter() -> None:
    """Without spreads three points leave one degree of freedom: intervals hold the truth as often as they say."""
    serial, noise, counts = 0.2, random.Random(0), COUNTS[:3]
    covered = 0
    for seed in range(60):
        rates = [laws.gustafson(serial, n) * math.exp(noise.gauss(0.0, 0.02)) for n in counts]
        fits = laws.resampled(laws.fit_gustafson, counts, rates, draws=60, seed=seed)
        low, high = laws.interval([fit.serial_fraction for fit in fits])
        covered += low <= serial <= high
    assert 48 <= covered < 60


@given(st.integers(0, 1 << 30))
def test_resampling_repeats(seed: int) -> None:
    """The same arguments give the same fits, another seed others."""
    given_ = (laws.fit_gustafson, COUNTS[:3], [1.0, 1.9, 3.6], [0.01] * 3)
    first = laws.resampled(*given_, draws=3, seed=seed)
    assert first == laws.resampled(*given_, draws=3, seed=seed)
    assert first != laws.resampled(*given_, draws=3, seed=seed + 1)


def test_what_a_law_misses_widens_its_interval() -> None:
    """Points far off the curve make it less sure than their own spreads do."""
    exact = [laws.amdahl(0.9, n) for n in COUNTS]
    bent = [value * (1.2 if n % 2 else 0.8) for n, value in enumerate(exact)]
    widths = []
    for rates in (exact, bent):
        fits = laws.resampled(laws.fit_amdahl, COUNTS, rates, [0.001] * 6, draws=50)
        low, high = laws.interval([fit.serial_fraction for fit in fits])
        widths.append(high - low)
    assert widths[1] > 10 * widths[0]


def test_nothing_is_resampled_where_nothing_tells() -> None:
    """Two points, two coefficients and no spreads: an interval of no width would be a lie."""
    assert laws.resampled(laws.fit_amdahl, [1, 2], [1.0, 1.9]) == ()
    assert laws.resampled(laws.fit_usl, [1, 2, 4], [1.0, 1.9, 3.5]) == ()
    assert len(laws.resampled(laws.fit_amdahl, [1, 2, 4], [1.0, 1.9, 3.0], draws=5)) == 5
    assert len(laws.resampled(laws.fit_amdahl, [1, 2], [1.0, 1.9], [0.01, 0.01], draws=5)) == 5


def test_an_infinite_value_is_an_end() -> None:
    """Peaks of laws without coherence lie at no number."""
    assert laws.interval([1.0] + [math.inf] * 9) == (1.0, math.inf)
    assert laws.interval([math.inf] * 3) == (math.inf, math.inf)


def test_what_is_refused() -> None:
    """Spreads that are not one for each point, negative ones, and intervals of nothing."""
    with pytest.raises(
        LawError, match=r"^wanted one spread per throughput, got 1 for 2; give one for each$"
    ):
        laws.resampled(laws.fit_amdahl, [1, 2], [1.0, 1.9], [0.1])
    with pytest.raises(
        LawError, match=r"^wanted a finite spread >= 0, got -0\.1; give a number in that range$"
    ):
        laws.resampled(laws.fit_amdahl, [1, 2], [1.0, 1.9], [0.1, -0.1])
    with pytest.raises(
        LawError, match=r"^wanted values for an interval, got none; resample with spreads$"
    ):
        laws.interval([])


def test_coefficients_by_name() -> None:
    """What follows from a law's coefficients stands beside them."""
    amdahl = laws.fit_amdahl([1, 2, 4], [laws.amdahl(0.9, n) for n in (1, 2, 4)])
    assert amdahl.coefficients == pytest.approx({"serial_fraction": 0.1, "limit": 10.0}, rel=1e-4)
    usl = laws.fit_usl(COUNTS, [laws.usl(n, sigma=0.1, kappa=0.01) for n in COUNTS])
    assert usl.coefficients["peak"] == pytest.approx(math.sqrt(90.0), rel=1e-2)
    assert usl.throughput(8) == pytest.approx(laws.usl(8, sigma=0.1, kappa=0.01), rel=1e-4)
