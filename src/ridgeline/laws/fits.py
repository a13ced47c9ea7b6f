"""Fits of the speed-up laws to measured throughputs.

They describe measured scaling; they do not predict it. A fit says nothing about the first size at which
the topology changes, so predictions come from the simulator and these laws are drawn beside it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.laws.amdahl import amdahl_limit, gustafson, usl, usl_peak
from ridgeline.laws.arguments import check_points

_ITERATIONS = 200
_SMALLEST_STEP = 1e-12
_MIN_POINTS_FOR_KAPPA = 5


class AmdahlFit(NamedTuple):
    """Amdahl's law through measured points; `max_error` is its worst relative miss of a point."""

    serial_fraction: float
    rate: float
    max_error: float

    num_fitted = 2
    note = ""

    @property
    def coefficients(self) -> dict[str, float]:
        """What people read of it, by name: `limit` is the speed-up that no number of workers exceeds."""
        return {
            "serial_fraction": self.serial_fraction,
            "limit": amdahl_limit(1.0 - self.serial_fraction),
        }

    def throughput(self, workers: float) -> float:
        """Work per second of so many workers, by the fitted law."""
        return usl(workers, sigma=self.serial_fraction, kappa=0.0, rate=self.rate)


class GustafsonFit(NamedTuple):
    """Gustafson's law through measured points, of work that grows with the workers.

    `serial_fraction` is the share of the parallel run's time that is serial; `max_error` the worst relative
    miss of a point.
    """

    serial_fraction: float
    rate: float
    max_error: float

    num_fitted = 2
    note = ""

    @property
    def coefficients(self) -> dict[str, float]:
        """What people read of it, by name."""
        return {"serial_fraction": self.serial_fraction}

    def throughput(self, workers: float) -> float:
        """Work per second of so many workers, by the fitted law."""
        return self.rate * gustafson(self.serial_fraction, workers)


class USLFit(NamedTuple):
    """The universal scalability law through measured points.

    `note` is empty when the points determine kappa, else it says why they do not: then `kappa` and the
    peak that follows from it mean nothing.
    """

    rate: float
    sigma: float
    kappa: float
    max_error: float
    is_kappa_identifiable: bool
    note: str

    num_fitted = 3

    @property
    def coefficients(self) -> dict[str, float]:
        """What people read of it, by name: `peak` is the number of workers with the most throughput."""
        return {
            "sigma": self.sigma,
            "kappa": self.kappa,
            "peak": usl_peak(self.sigma, self.kappa),
        }

    def throughput(self, workers: float) -> float:
        """Work per second of so many workers, by the fitted law."""
        return usl(workers, sigma=self.sigma, kappa=self.kappa, rate=self.rate)


def fit_amdahl(workers: Sequence[float], throughputs: Sequence[float]) -> AmdahlFit:
    """Amdahl's law that comes nearest to measured throughputs, in least squares of their logarithms.

    The rate of one worker is fitted too, because its measurement is as noisy as the others.

    Args:
        workers: Numbers of workers, at least two different ones.
        throughputs: Work per second of each, in any one unit.

    Raises:
        LawError: too few points or numbers out of range.

    Source: the universal scalability law with kappa = 0 is Amdahl's law.

    Example:
        >>> from ridgeline.laws.amdahl import amdahl
        >>> fit = fit_amdahl([1, 2, 4], [1.0, amdahl(0.9, 2), amdahl(0.9, 4)])
        >>> round(fit.serial_fraction, 6), round(fit.rate, 6)
        (0.1, 1.0)
    """
    counts, values = np.asarray(check_points(workers, throughputs, 2), float)
    (sigma, _), _ = _least_squares(counts, values, has_kappa=False)
    shape = np.array([usl(float(n), sigma=sigma, kappa=0.0) for n in counts])
    rate = _rate(shape, values)
    return AmdahlFit(sigma, rate, _max_error(rate * shape, values))


def fit_gustafson(workers: Sequence[float], throughputs: Sequence[float]) -> GustafsonFit:
    """Gustafson's law that comes nearest to measured throughputs, in least squares of relative misses.

    Args:
        workers: Numbers of workers, at least two different ones, each with as much work for itself.
        throughputs: Work per second of each, in any one unit.

    Raises:
        LawError: too few points or numbers out of range.

    Source: Gustafson 1988, with the rate of one worker as a second coefficient: X = rate (N - s (N - 1)).

    Example:
        >>> fit = fit_gustafson([1, 2, 4], [10.0, 19.0, 37.0])
        >>> round(fit.serial_fraction, 6), round(fit.rate, 6)
        (0.1, 10.0)
    """
    counts, values = np.asarray(check_points(workers, throughputs, 2), float)
    # Divided by the values, misses are relative; else the largest throughputs alone would decide.
    terms = np.stack([counts / values, (1.0 - counts) / values], axis=1)
    rate, lost = (float(v) for v in np.linalg.lstsq(terms, np.ones(len(values)), rcond=None)[0])
    serial = min(1.0, max(0.0, lost / rate)) if rate > 0.0 else 1.0
    # A share that was cut to its range needs another rate than the one found with it.
    shape = np.array([gustafson(serial, float(n)) for n in counts])
    rate = float(np.sum(shape / values) / np.sum((shape / values) ** 2))
    return GustafsonFit(serial, rate, _max_error(rate * shape, values))


def fit_usl(workers: Sequence[float], throughputs: Sequence[float]) -> USLFit:
    """The universal scalability law that comes nearest to measured throughputs (see `fit_amdahl`).

    Args:
        workers: Numbers of workers, at least three different ones; six or more are advisable.
        throughputs: Work per second of each, in any one unit.

    Raises:
        LawError: too few points or numbers out of range.

    Source: Gunther 2007; rate fitted as a third coefficient after Schwartz, "Practical scalability
        analysis with the universal scalability law", 2015.

    Example:
        >>> fit = fit_usl([1, 2], [1.0, 1.9])
        Traceback (most recent call last):
        ridgeline.errors.LawError: wanted at least 3 different numbers of workers to fit, got 2; \
measure more points
    """
    counts, values = np.asarray(check_points(workers, throughputs, 3), float)
    (sigma, kappa), kappa_error = _least_squares(counts, values, has_kappa=True)
    different = len(set(counts.tolist()))
    note = ""
    if different < _MIN_POINTS_FOR_KAPPA:
        note = (
            f"kappa is not identifiable: {different} different numbers of workers, "
            f"wanted at least {_MIN_POINTS_FOR_KAPPA}"
        )
    elif kappa <= 2.0 * kappa_error:
        note = (
            f"kappa is not identifiable: {kappa:.2g} is within two standard errors "
            f"({kappa_error:.2g}) of zero"
        )
    shape = np.array([usl(float(n), sigma=sigma, kappa=kappa) for n in counts])
    rate = _rate(shape, values)
    return USLFit(rate, sigma, kappa, _max_error(rate * shape, values), not note, note)


def _least_squares(
    counts: NDArray[np.float64], values: NDArray[np.float64], *, has_kappa: bool
) -> tuple[tuple[float, float], float]:
    """(sigma, kappa) by Levenberg-Marquardt inside the bounds, and the standard error of kappa.

    In the logarithm the rate is the mean of what is left, so that centring removes it from the search.
    """
    others = counts - 1.0
    terms = np.stack([others, counts * others])[: 2 if has_kappa else 1]
    # Where each term weighs as much as the work itself: far from there the misses hardly change.
    parameters = 1.0 / terms.max(axis=1)
    upper = np.array([1.0, np.inf])[: len(terms)]
    logs = np.log(values) - np.log(counts)

    def residual(candidate: NDArray[np.float64]) -> NDArray[np.float64]:
        left = logs + np.log1p(candidate @ terms)
        return left - left.mean()

    damping = 1e-3
    current = residual(parameters)
    for _ in range(_ITERATIONS):
        jacobian = terms / (1.0 + parameters @ terms)
        jacobian = jacobian - jacobian.mean(axis=1, keepdims=True)
        normal, slope = jacobian @ jacobian.T, jacobian @ current
        # What would leave its bounds stays there; else the others creep towards their best in tiny steps.
        is_free = ~((parameters <= 0.0) & (slope > 0.0) | (parameters >= upper) & (slope < 0.0))
        damped = normal * np.outer(is_free, is_free) + damping * np.diag(np.diag(normal) + 1e-300)
        # `lstsq` and not `solve`: over few numbers of workers the two terms are almost collinear.
        step = np.linalg.lstsq(damped, slope * is_free, rcond=None)[0]
        candidate = np.clip(parameters - step, 0.0, upper)
        moved = np.abs(candidate - parameters)
        trial = residual(candidate)
        if trial @ trial < current @ current:
            parameters, current, damping = candidate, trial, max(damping / 5.0, 1e-12)
        else:
            damping *= 5.0
        # Relative to each parameter, and absolute near 0, where kappa often ends.
        if np.all(moved <= _SMALLEST_STEP * (parameters + _SMALLEST_STEP)):
            break
    kappa_error = 0.0
    if has_kappa:
        # Rate, sigma and kappa are fitted: of three points nothing is left to tell the scatter from.
        freedom = max(1, len(values) - 3)
        covariance = np.linalg.pinv(normal) * float(current @ current) / freedom
        kappa_error = math.sqrt(max(0.0, float(covariance[1, 1])))
    return (float(parameters[0]), float(parameters[1]) if has_kappa else 0.0), kappa_error


def _rate(shape: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    return float(np.exp(np.mean(np.log(values) - np.log(shape))))


def _max_error(fitted: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    return float(np.max(np.abs(fitted / values - 1.0)))
