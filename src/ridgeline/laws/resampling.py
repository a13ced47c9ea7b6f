"""How sure a fitted law is: fits to throughputs as they might have been measured as well."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from ridgeline.errors import LawError
from ridgeline.given import checked
from ridgeline.laws.arguments import check, check_numbers

SHARE = 0.9
"""Of the resampled values that an interval covers."""
QUARTILES_IN_DEVIATIONS = 1.349
"""How many standard deviations the quartiles of a normal distribution are apart."""
_MOST_SPREAD = 3.0
"""Of logarithms: throughputs that scatter by more than a factor of 20 say nothing, and leave all bounds."""
LEAST_TO_EXTRAPOLATE = 6
"""Different numbers of workers. With fewer, a law that fits them all says little of larger numbers: fitted to
1, 2 and 4 GPUs it missed 8 by up to 26 % (TensorFlow benchmarks, VGG-16). Source of the number: the advice on
the universal scalability law."""


class Fit(Protocol):
    """A law with its coefficients."""

    @property
    def num_fitted(self) -> int:
        """How many of its numbers were fitted."""

    @property
    def note(self) -> str:
        """What they do not say; empty where they say all."""

    @property
    def coefficients(self) -> dict[str, float]:
        """What people read of it, by name."""

    def throughput(self, workers: float) -> float:
        """Work per second of so many workers."""


F = TypeVar("F", bound=Fit)


@checked(LawError, but=("workers", "throughputs", "spreads"))
def resampled(
    fit: Callable[[Sequence[float], Sequence[float]], F],
    workers: Sequence[float],
    throughputs: Sequence[float],
    spreads: Sequence[float] = (),
    *,
    draws: int = 200,
    seed: int = 0,
) -> tuple[F, ...]:
    """Fits to `draws` sets of throughputs that scatter as the measured ones do: a parametric bootstrap.

    Each throughput is drawn from a log-normal distribution around the measured one, as wide as its own spread
    and what the law leaves unexplained beyond it. The latter rests on few misses, so each set has a width of
    its own, by which intervals grow as by Student's distribution. The same arguments give the same fits.

    Args:
        fit: `fit_amdahl`, `fit_gustafson` or `fit_usl`.
        workers: As it takes them.
        throughputs: As it takes them.
        spreads: Relative standard deviation of each throughput; none: 0 for all.
        draws: Number of sets.
        seed: Of the random numbers.

    Returns:
        Nothing where it is unknown how far throughputs scatter: no spreads, and no more points than the law
        has coefficients.

    Raises:
        LawError: what `fit` refuses; spreads that are not one for each point, or not from 0 to 3; a seed
            below 0.

    Source: Efron, Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 6; that misses of `f` degrees
        of freedom tell a variance up to `f` over a chi-squared variable: Student, "The probable error of a
        mean", Biometrika 6(1), 1908.

    Example:
        >>> from ridgeline.laws.fits import fit_amdahl
        >>> fits = resampled(fit_amdahl, [1, 2, 4], [1.0, 1.82, 3.08], [0.01] * 3)
        >>> low, high = interval([one.serial_fraction for one in fits])
        >>> low < 0.1 < high
        True
    """
    found = fit(workers, throughputs)
    workers, throughputs = check_numbers("workers", workers), check_numbers("value", throughputs)
    spreads = check_numbers(
        "spread", check_numbers("spread", spreads, least=0.0), most=_MOST_SPREAD
    )
    if spreads and len(spreads) != len(throughputs):
        raise LawError(
            f"wanted one spread per throughput, got {len(spreads)} for {len(throughputs)}; give one for each"
        )
    check("number of draws", draws, least=1)
    check("seed", seed, least=0)
    freedom = len(throughputs) - found.num_fitted
    # Spreads of 0 that were given are knowledge, and none given is not.
    if freedom < 1 and not spreads:
        return ()
    known = np.square(np.asarray(spreads or [0.0] * len(throughputs), float))
    beyond = max(0.0, _unexplained(found, workers, throughputs) ** 2 - float(known.mean()))
    random = np.random.default_rng(seed)
    noise = random.standard_normal((draws, len(throughputs)))
    # The same in all of a set, as one variance was told from all misses.
    growth = max(1, freedom) / random.chisquare(max(1, freedom), (draws, 1))
    widths = np.minimum(np.sqrt(known + beyond * growth), _MOST_SPREAD)
    # Log-normal, since fits refuse throughputs at or below 0.
    sets = np.asarray(throughputs, float) * np.exp(noise * widths)
    return tuple(fit(workers, row.tolist()) for row in sets)


def interval(values: Sequence[float], share: float = SHARE) -> tuple[float, float]:
    """The middle `share` of values, by their quantiles.

    Raises:
        LawError: no values, or a share that is not between 0 and 1.

    Example:
        >>> interval([float(n) for n in range(101)])
        (5.0, 95.0)
    """
    check("share", share, above=0.0, most=1.0)
    values = check_numbers("value", values, is_finite=False)
    if not values:
        raise LawError("wanted values for an interval, got none; resample with spreads")
    ends = [(1.0 - share) / 2.0, (1.0 + share) / 2.0]
    # One of the values each: between two of them lies nothing where one is infinite.
    low, high = np.quantile(np.asarray(values, float), ends, method="inverted_cdf")
    return float(low), float(high)


def _unexplained(found: Fit, workers: Sequence[float], throughputs: Sequence[float]) -> float:
    """Standard deviation of the logarithms of what the law misses; 0 where it has a coefficient a point."""
    freedom = len(throughputs) - found.num_fitted
    if freedom < 1:
        return 0.0
    pairs = zip(workers, throughputs, strict=True)
    misses = [math.log(value / found.throughput(count)) for count, value in pairs]
    return math.sqrt(sum(miss * miss for miss in misses) / freedom)
