"""Laws at the ends of what floats can say: a number or a plain error, never an error of Python's own."""

import contextlib
import itertools
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pytest
import torch

from ridgeline import laws
from ridgeline.errors import LawError
from strategies import measured

EXTREMES = (
    0,
    1,
    -1,
    0.5,
    3.0,
    1e-320,
    1e-300,
    1e300,
    1.7e308,
    math.inf,
    -math.inf,
    math.nan,
    10**400,
)
PLAIN: tuple[tuple[Callable[..., float], int], ...] = (
    (laws.amdahl, 2),
    (laws.karp_flatt, 2),
    (laws.gustafson, 2),
    (laws.usl_peak, 2),
    (lambda n, s, k: laws.usl(n, sigma=s, kappa=k, rate=1.7e308), 3),
    (laws.roofline, 3),
    (laws.ridge_point, 2),
    (laws.pipelined_seconds, 2),
    (laws.pipelined_speedup, 3),
    (laws.pipelined_parallel_fraction, 3),
    (laws.pipeline_bubble, 2),
    (laws.ring_all_reduce_seconds, 3),
    (laws.tree_all_reduce_seconds, 3),
    (laws.broadcast_seconds, 3),
    (laws.parameter_server_seconds, 3),
    (laws.wire_intensity, 2),
)


@pytest.mark.parametrize(("law", "num_arguments"), PLAIN)
def test_no_number_makes_a_law_fail_otherwise(
    law: Callable[..., float], num_arguments: int
) -> None:
    """Every combination of extreme arguments gives a number, or an error that says what was wanted."""
    for arguments in itertools.product(EXTREMES, repeat=num_arguments):
        # Any other error fails the test.
        with contextlib.suppress(LawError):
            assert not math.isnan(law(*arguments)), arguments


def test_a_number_that_no_float_holds_is_refused_by_its_size() -> None:
    """Whole numbers of Python's have no end, and floats do."""
    with pytest.raises(
        LawError,
        match=r"^wanted a finite speedup > 0, got a whole number of 1329 bits; give a number in that range$",
    ):
        laws.amdahl(0.9, 10**400)


@pytest.mark.parametrize("wrong", ["3", None, 1j, [1.0], Decimal(2), measured(2.0, "B/s")])
def test_what_is_no_number_is_named(wrong: Any) -> None:
    """Texts, lists, decimals and a machine's quantities: with the argument that they were given as."""
    told = rf" got a {type(wrong).__name__}; give a float, such as the value of a Quantity$"
    with pytest.raises(LawError, match=f"^wanted one number as peak_flops_per_s,{told}"):
        laws.roofline(2.0, wrong, 1e9)
    with pytest.raises(LawError, match=f"^wanted one number as workers,{told}"):
        laws.ring_all_reduce_seconds(1e6, wrong, 1e9)


def test_fractions_are_numbers_and_refused_as_such() -> None:
    """They count as floats do, also where they are out of range."""
    assert laws.gustafson(Fraction(1, 4), 5) == 4.0
    with pytest.raises(LawError, match=r"^wanted a finite workers >= 1, got 0\.25; give a number"):
        laws.gustafson(0.5, Fraction(1, 4))


@pytest.mark.parametrize("sigma", [0.0, 1e-5, 0.1, 1.0])
@pytest.mark.parametrize("kappa", [0.0, 1e-10, 1e-3])
def test_a_fit_to_many_workers_finds_the_law(sigma: float, kappa: float) -> None:
    """From ten to a million, and none of few: where it begins, all terms weigh alike."""
    for least in (10, 10_000):
        workers = [least * times for times in (1, 3, 6, 9, 20, 60, 100)]
        points = [laws.usl(n, sigma=sigma, kappa=kappa) for n in workers]
        assert laws.fit_usl(workers, points).max_error < 0.02


def test_quotients_too_small_for_a_float_are_no_division_by_zero() -> None:
    """A ridge point near 0 leaves computing the limit; work that takes no time was sped up without end."""
    assert laws.pipelined_parallel_fraction(2.0, 1e-300, 1.7e308) == 1.0
    assert laws.pipelined_speedup(1e-300, 0.0, 1e300) == math.inf
    assert laws.pipelined_speedup(1e10, 1.0, 1e-300) == 0.0


def test_infinite_workers_are_refused_by_trees_as_by_rings() -> None:
    """The depth of a tree is asked for before anything else."""
    for law in (laws.tree_all_reduce_seconds, laws.broadcast_seconds):
        with pytest.raises(LawError, match=r"^wanted a finite workers >= 1, got inf"):
            law(1e9, math.inf, 1e9)


@pytest.mark.parametrize("fit", [laws.fit_amdahl, laws.fit_gustafson, laws.fit_usl])
def test_fits_refuse_what_their_squares_cannot_hold(fit: Callable[..., object]) -> None:
    """Throughputs and numbers of workers at the ends of the range fit, and beyond them are named."""
    fit([1.0, 2.0, 1e15], [1e-60, 1.0, 1e60])
    with pytest.raises(
        LawError, match=r"^wanted a finite value >= 1e-60 and <= 1e\+60, got 1e-310"
    ):
        fit([1, 2, 4], [1e-310] * 3)
    with pytest.raises(LawError, match=r"^wanted a finite workers >= 1 and <= 1e\+15, got 1e\+300"):
        fit([1, 2, 1e300], [1.0, 2.0, 3.0])


def test_resampling_refuses_what_is_no_sample() -> None:
    """Draws below one, spreads of many decades, and values that are no numbers."""
    points = ([1, 2, 4], [1.0, 1.8, 3.0])
    with pytest.raises(LawError, match=r"^wanted a finite number of draws >= 1, got -1"):
        laws.resampled(laws.fit_amdahl, *points, draws=-1)
    with pytest.raises(LawError, match=r"^wanted a finite spread <= 3, got 1000"):
        laws.resampled(laws.fit_amdahl, *points, [1e3] * 3)
    with pytest.raises(LawError, match=r"^wanted a value, got nan; give a number in that range$"):
        laws.interval([1.0, math.nan])


@pytest.mark.parametrize("fit", [laws.fit_amdahl, laws.fit_gustafson, laws.fit_usl])
def test_points_come_in_lists_arrays_and_tensors(fit: Callable[..., Any]) -> None:
    """All fit alike; a set has no order, and what is no sequence is named."""
    workers, rates = [1, 2, 4, 4], [1.0, 1.8, 3.0, 3.1]
    found = fit(workers, rates)
    for kind in (np.asarray, torch.tensor, lambda values: [*map(torch.tensor, values)]):
        same = fit(kind(workers), kind(rates))
        assert same.throughput(3) == pytest.approx(found.throughput(3), rel=1e-4)
    tensors = [torch.tensor(2.0), torch.tensor(2.0)]
    with pytest.raises(LawError, match=r"different numbers of workers to fit, got 1; measure more"):
        fit(tensors, [1.0, 2.0])
    for wrong in (None, 3, {1, 2}, "12", iter([1, 2]), np.ones((2, 2)), [None, None]):
        with pytest.raises(
            LawError, match=r"^wanted (a sequence of numbers|one number) as workers"
        ):
            fit(wrong, rates)


def test_arrays_are_resampled_and_flows_are_flows() -> None:
    """The same draws as of lists; what is of no use says what is wanted."""
    workers, rates, spreads = [1, 2, 4], [1.0, 1.8, 3.0], [0.01] * 3
    found = laws.resampled(laws.fit_amdahl, workers, rates, spreads, draws=5)
    arrays = [np.asarray(values) for values in (workers, rates, spreads)]
    assert laws.resampled(laws.fit_amdahl, *arrays, draws=5) == found
    assert laws.interval(np.arange(101.0)) == (5.0, 95.0)
    calls: list[Callable[[], object]] = [
        lambda: laws.resampled(cast("Any", None), workers, rates),
        lambda: laws.resampled(laws.fit_amdahl, workers, rates, spreads, seed=-1),
        lambda: laws.interval(cast("Any", None)),
        lambda: laws.fair_rates(cast("Any", None), {}),
        lambda: laws.fair_rates([laws.Flow(cast("Any", "link"))], {"link": 1.0}),
        lambda: laws.fair_finish_seconds([], cast("Any", None)),
        lambda: laws.slowest_of(cast("Any", [2]), 0.1),
    ]
    for call in calls:
        with pytest.raises(LawError, match=r"^wanted "):
            call()


def test_links_that_nobody_uses_may_have_any_capacity() -> None:
    """Only those on the way of a flow are looked at."""
    assert laws.fair_rates([laws.Flow(("a",))], {"a": 2.0, "b": 10**400}) == (2.0,)
