"""Speed-up laws: Amdahl, Karp-Flatt, Gustafson and the universal scalability law; `fits` fits them."""

import math

from ridgeline.laws.arguments import check


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
    # Python divides by no 0.0; everything infinitely fast takes no time.
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
    # The rate last: its product with the workers may be infinite where the costs of agreeing are, too.
    return rate * (workers / (1.0 + sigma * others + kappa * workers * others))


def usl_peak(sigma: float, kappa: float) -> float:
    """Number of workers with the most throughput: `sqrt((1 - sigma) / kappa)`, infinite for kappa = 0.

    Never below 1: where each further worker costs more than it adds, one alone does most.

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
    return math.inf if kappa == 0.0 else max(1.0, math.sqrt((1.0 - sigma) / kappa))
