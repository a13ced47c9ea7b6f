"""The slowest of several workers: what waiting for all costs where each takes a time of its own."""

import math
from functools import lru_cache

from ridgeline.laws.arguments import check

_STEP = 1.0 / 64.0
"""Between the points at which densities are summed, in standard deviations. The trapezoidal rule converges
exponentially for bells; that of the largest of 10^9 is six times as narrow as that of one."""
_WIDEST = 15.0
"""Standard deviations beyond which no density is left, of the largest of 10^9 neither."""
MOST_SPREAD = 2.0
"""Of logarithms; with more, a worker takes less than a fifth of the mean time as often as not."""


def slowest_of(workers: int, spread: float, *, slow: int = 0, slowdown: float = 1.0) -> float:
    """How many times as long the slowest of some workers takes as one takes on average.

    The time of each is log-normal, by itself, with a mean of 1; slow ones take `slowdown` times as long.

    Args:
        workers: Who wait for each other, at least 1; a single one does not wait.
        spread: Standard deviation of the logarithm of a worker's time, which is about that of the time over
            its mean.
        slow: How many of the workers are slow; never all of them, so that a worker alone is not.
        slowdown: How many times as long these take, at least 1.

    Raises:
        LawError: a number is out of range.

    Cost: 1 ms, the first time for these arguments.

    Source: the mean of the largest of independent values, the integral of x dF(x) with F the product of their
        distributions: David, Nagaraja, "Order Statistics", 3rd edition, 2003, sections 2.1, 3.1 and 5.2.

    Example:
        >>> slowest_of(1, 0.1), slowest_of(64, 0.0), slowest_of(64, 0.0, slow=1, slowdown=1.3)
        (1.0, 1.0, 1.3)
        >>> round(slowest_of(64, 0.05), 3), round(slowest_of(10_000, 0.05), 3)
        (1.123, 1.211)
    """
    check("workers", workers, least=1)
    check("spread", spread, least=0.0, most=MOST_SPREAD)
    check("slow", slow, least=0)
    check("slowdown", slowdown, least=1.0)
    return _slowest_of(float(workers), float(spread), float(slow), float(slowdown))


# Behind the checks: what is no number may have no hash either.
@lru_cache(maxsize=4096)
def _slowest_of(workers: float, spread: float, slow: float, slowdown: float) -> float:
    late = min(slow, workers - 1)
    least = slowdown if late else 1.0
    if workers == 1 or spread == 0.0:
        return least
    apart = math.log(slowdown) / spread
    # By deviations of the logarithm, of which both kinds have the same.
    usual = _mean_of_largest(workers - late, late, -apart, spread)
    whole = usual + slowdown * _mean_of_largest(late, workers - late, apart, spread)
    return max(least, whole)  # sums are rounded


def _mean_of_largest(own: float, others: float, ahead: float, spread: float) -> float:
    """What those of one kind add to the mean of the largest: its value where it is theirs.

    Args:
        own: How many there are of them.
        others: How many of the other kind.
        ahead: By how many deviations their logarithms are larger.
        spread: The standard deviation.
    """
    if not own:
        return 0.0
    total = 0.0
    for number in range(math.ceil(2.0 * _WIDEST / _STEP)):
        z = number * _STEP - _WIDEST
        # In logarithms: with 10^9 workers the power of the distribution would underflow.
        below = (own - 1) * _log_cdf(z) if own > 1 else 0.0
        below += others * _log_cdf(z + ahead) if others else 0.0
        total += math.exp(spread * z - 0.5 * (spread * spread + z * z) + below)
    return own * total * _STEP / math.sqrt(2.0 * math.pi)


def _log_cdf(z: float) -> float:
    """Logarithm of the normal distribution, exact in both of its tails."""
    # `erfc` of the nearer tail; 1 minus the other one would leave no digits.
    if z > 0.0:
        return math.log1p(-0.5 * math.erfc(z / math.sqrt(2.0)))
    below = 0.5 * math.erfc(-z / math.sqrt(2.0))
    return math.log(below) if below else -math.inf
