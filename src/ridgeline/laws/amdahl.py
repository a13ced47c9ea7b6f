"""Speed-up laws: Amdahl, Karp-Flatt, Gustafson and the universal scalability law, and their fits.

They describe measured scaling; they do not predict it. A fit says nothing about the first size at which
the topology changes, so predictions come from the simulator and these laws are drawn beside it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.laws.arguments import check, check_points

_ITERATIONS = 200
_MIN_POINTS_FOR_KAPPA = 5


def amdahl(parallel_fraction: float, speedup: float) -> float:
    """Speed-up of a task when a part of it runs `speedup` times faster and the rest as before.

    Args:
        parallel_fraction: Share of the original time that gets faster, 0 to 1.
        speedup: How much faster that part runs (workers, say); `math.inf` is allowed.

    Raises:
        LawError: a number is out of range.

    Source: Amdahl, "Validity of the single processor approach", AFIPS 1967: 1 / (1 - p + p / s).

    Example:
        >>> round(amdahl(0.9, 3.0), 6), round(amdahl(0.9, 9.0), 6)
        (2.5, 5.0)
    """
    check("parallel_fraction", parallel_fraction, least=0.0, most=1.0)
    check("speedup", speedup, above=0.0, is_finite=False)
    time = (1.0 - parallel_fraction) + parallel_fraction / speedup
    return math.inf if time == 0.0 else 1.0 / time


def amdahl_limit(parallel_fraction: float) -> float:
    """Speed-up that no number of workers exceeds: `1 / (1 - p)`, infinite for p = 1.

    Args:
        parallel_fraction: Share of the original time that gets faster, 0 to 1.

    Raises:
        LawError: the fraction is out of range.

    Source: Amdahl 1967, the limit of an infinitely fast parallel part.

    Example:
        >>> round(amdahl_limit(0.9), 6)
        10.0
    """
    return amdahl(parallel_fraction, math.inf)


def karp_flatt(speedup: float, workers: float) -> float:
    """Serial fraction that a measured speed-up reveals.

    Constant over the number of workers: a serial part limits. Rising: overhead grows with workers.

    Args:
        speedup: Time of one worker divided by time of `workers` workers.
        workers: Number of workers, above 1.

    Raises:
        LawError: a number is out of range.

    Source: Karp, Flatt, "Measuring parallel processor performance", CACM 33(5), 1990.

    Example:
        >>> round(karp_flatt(2.5, 3.0), 6)
        0.1
    """
    check("speedup", speedup, above=0.0)
    check("workers", workers, above=1.0)
    return (1.0 / speedup - 1.0 / workers) / (1.0 - 1.0 / workers)


def gustafson(serial_fraction: float, workers: float) -> float:
    """Scaled speed-up when the work grows with the workers (weak scaling).

    Args:
        serial_fraction: Share of the *parallel* run's time that is serial, 0 to 1.
        workers: Number of workers, at least 1.

    Raises:
        LawError: a number is out of range.

    Source: Gustafson, "Reevaluating Amdahl's law", CACM 31(5), 1988: N - s (N - 1).

    Example:
        >>> gustafson(0.1, 11.0)
        10.0
    """
    check("serial_fraction", serial_fraction, least=0.0, most=1.0)
    check("workers", workers, least=1.0)
    return workers - serial_fraction * (workers - 1.0)


def usl(workers: float, *, sigma: float, kappa: float, rate: float = 1.0) -> float:
    """Throughput of `workers` workers under the universal scalability law.

    Args:
        workers: Number of workers, at least 1.
        sigma: Contention (serial share), 0 to 1.
        kappa: Coherence: cost of every pair of workers that must agree, at least 0.
        rate: Throughput of one worker; 1 gives the speed-up.

    Raises:
        LawError: a number is out of range.

    Source: Gunther, "Guerrilla Capacity Planning", 2007: X = rate N / (1 + sigma (N-1) + kappa N (N-1)).

    Example:
        >>> usl(4.0, sigma=0.0, kappa=0.0, rate=10.0)
        40.0
    """
    check("workers", workers, least=1.0)
    check("sigma", sigma, least=0.0, most=1.0)
    check("kappa", kappa, least=0.0)
    check("rate", rate, above=0.0)
    others = workers - 1.0
    return rate * workers / (1.0 + sigma * others + kappa * workers * others)


def usl_peak(sigma: float, kappa: float) -> float:
    """Number of workers with the most throughput: `sqrt((1 - sigma) / kappa)`, infinite for kappa = 0.

    Args:
        sigma: Contention, 0 to 1.
        kappa: Coherence, at least 0.

    Raises:
        LawError: a number is out of range.

    Source: Gunther 2007, the zero of the derivative of the universal scalability law.

    Example:
        >>> usl_peak(0.0, 0.01)
        10.0
    """
    check("sigma", sigma, least=0.0, most=1.0)
    check("kappa", kappa, least=0.0)
    return math.inf if kappa == 0.0 else math.sqrt((1.0 - sigma) / kappa)


class AmdahlFit(NamedTuple):
    """Amdahl's law through measured points; `max_error` is its worst relative miss of a point."""

    serial_fraction: float
    rate: float
    max_error: float


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
        >>> fit = fit_amdahl([1, 2, 4], [1.0, amdahl(0.9, 2), amdahl(0.9, 4)])
        >>> round(fit.serial_fraction, 6), round(fit.rate, 6)
        (0.1, 1.0)
    """
    check_points(workers, throughputs, 2)
    counts, values = np.asarray(workers, float), np.asarray(throughputs, float)
    (sigma, _), _ = _least_squares(counts, values, has_kappa=False)
    rate = _rate(counts, values, sigma, 0.0)
    return AmdahlFit(sigma, rate, _max_error(counts, values, rate, sigma, 0.0))


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
    check_points(workers, throughputs, 3)
    counts, values = np.asarray(workers, float), np.asarray(throughputs, float)
    (sigma, kappa), kappa_error = _least_squares(counts, values, has_kappa=True)
    different = len(set(workers))
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
    rate = _rate(counts, values, sigma, kappa)
    error = _max_error(counts, values, rate, sigma, kappa)
    return USLFit(rate, sigma, kappa, error, not note, note)


def _least_squares(
    counts: NDArray[np.float64], values: NDArray[np.float64], *, has_kappa: bool
) -> tuple[tuple[float, float], float]:
    """(sigma, kappa) by Levenberg-Marquardt inside the bounds, and the standard error of kappa.

    In the logarithm the rate is the mean of what is left, so that centring removes it from the search.
    """
    others = counts - 1.0
    terms = np.stack([others, counts * others])[: 2 if has_kappa else 1]
    parameters = np.array([0.05, 1e-3])[: len(terms)]
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
        normal = jacobian @ jacobian.T
        scale = np.diag(np.diag(normal) + 1e-300)
        step = np.linalg.lstsq(normal + damping * scale, jacobian @ current, rcond=None)[0]
        candidate = np.clip(parameters - step, 0.0, upper)
        trial = residual(candidate)
        if trial @ trial < current @ current:
            parameters, current, damping = candidate, trial, max(damping / 5.0, 1e-12)
        else:
            damping *= 5.0
        if damping > 1e12:
            break
    kappa_error = 0.0
    if has_kappa:
        freedom = max(1, len(values) - 3)
        covariance = np.linalg.pinv(normal) * float(current @ current) / freedom
        kappa_error = math.sqrt(max(0.0, float(covariance[1, 1])))
    return (float(parameters[0]), float(parameters[1]) if has_kappa else 0.0), kappa_error


def _rate(
    counts: NDArray[np.float64], values: NDArray[np.float64], sigma: float, kappa: float
) -> float:
    shape = np.array([usl(float(n), sigma=sigma, kappa=kappa) for n in counts])
    return float(np.exp(np.mean(np.log(values / shape))))


def _max_error(
    counts: NDArray[np.float64],
    values: NDArray[np.float64],
    rate: float,
    sigma: float,
    kappa: float,
) -> float:
    fitted = np.array([usl(float(n), sigma=sigma, kappa=kappa, rate=rate) for n in counts])
    return float(np.max(np.abs(fitted / values - 1.0)))
