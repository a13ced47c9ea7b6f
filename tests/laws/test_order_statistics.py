"""The slowest of several workers: closed forms where there are any, tables, a Monte Carlo, and laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import LawError
from ridgeline.laws import slowest_of

spreads = st.sampled_from((1e-6, 0.01, 0.05)) | st.floats(0.0, 2.0)
slowdowns = st.floats(1.0, 5.0)


def normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


@given(st.floats(1e-3, 2.0))
def test_of_two_alike(spread: float) -> None:
    """Twice the mean times the probability that one exceeds the other, seen from where it does."""
    assert slowest_of(2, spread) == pytest.approx(2 * normal(spread / math.sqrt(2)), rel=1e-12)


@given(st.floats(1e-2, 2.0), slowdowns)
def test_of_two_one_of_which_is_slow(spread: float, slowdown: float) -> None:
    """The value of an option to exchange one for the other (Margrabe 1978), and the one that is given."""
    width = spread * math.sqrt(2.0)
    ahead = math.log(slowdown) / width
    wanted = normal(width / 2 - ahead) + slowdown * normal(width / 2 + ahead)
    assert slowest_of(2, spread, slow=1, slowdown=slowdown) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("workers", "deviations"), [(2, 0.56419), (5, 1.16296), (10, 1.53875), (100, 2.50759)]
)
def test_small_spreads_are_those_of_normal_values(workers: int, deviations: float) -> None:
    """The mean of the largest standard normal value: Tippett 1925, table; Harter 1961."""
    assert (slowest_of(workers, 1e-6) - 1.0) / 1e-6 == pytest.approx(deviations, abs=1e-5)


@pytest.mark.parametrize("slow", [0, 3])
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_as_drawn(spread: float, slow: int) -> None:
    """A seeded Monte Carlo of 64 workers comes as near as its own error tells."""
    noise = np.random.default_rng(0)
    drawn = np.exp(spread * noise.standard_normal((20_000, 64)) - spread**2 / 2)
    drawn[:, :slow] *= 1.3
    largest = drawn.max(axis=1)
    error = float(largest.std()) / math.sqrt(len(largest))
    found = slowest_of(64, spread, slow=slow, slowdown=1.3)
    assert abs(found - float(largest.mean())) < 4 * error
    assert error < 0.01


@given(st.integers(1, 20_000), st.integers(1, 20_000), spreads, st.integers(0, 5), slowdowns)
def test_more_workers_wait_longer(
    one: int, other: int, spread: float, slow: int, slowdown: float
) -> None:
    """And for slower ones longer, and where all differ more."""
    few, many = sorted((one, other))
    found = slowest_of(few, spread, slow=slow, slowdown=slowdown)
    within = found * (1 - 1e-12)
    assert found >= 1.0
    assert slowest_of(many, spread, slow=slow, slowdown=slowdown) >= within
    assert slowest_of(few, spread, slow=slow + 1, slowdown=slowdown) >= within
    assert slowest_of(few, spread, slow=slow, slowdown=2 * slowdown) >= within
    assert slowest_of(few, min(2.0, 2 * spread), slow=slow, slowdown=slowdown) >= within


@given(st.integers(1, 10**9), spreads, st.integers(0, 5), slowdowns)
def test_nothing_to_wait_for(workers: int, spread: float, slow: int, slowdown: float) -> None:
    """Equal workers, and one alone, however slow others would be, exactly; equal but for slow ones, for those."""
    assert slowest_of(workers, 0.0) == slowest_of(workers, 0.0, slow=slow) == 1.0
    assert slowest_of(1, spread, slow=slow, slowdown=slowdown) == 1.0
    late = slowest_of(workers + 1, 0.0, slow=1, slowdown=slowdown)
    assert late == slowdown
    nearly = slowest_of(workers + 1, 1e-9, slow=1, slowdown=1.5)
    assert nearly == pytest.approx(1.5, rel=1e-7)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"workers": 0, "spread": 0.1}, "wanted a finite workers >= 1, got 0"),
        ({"workers": 2, "spread": 2.1}, "wanted a finite spread >= 0 and <= 2, got 2.1"),
        ({"workers": 2, "spread": 0.1, "slow": -1}, "wanted a finite slow >= 0, got -1"),
        (
            {"workers": 2, "spread": 0.1, "slowdown": 0.5},
            "wanted a finite slowdown >= 1, got 0.5",
        ),
    ],
)
def test_messages(given_: dict, message: str) -> None:
    with pytest.raises(LawError) as caught:
        slowest_of(**given_)
    assert str(caught.value) == f"{message}; give a number in that range"
