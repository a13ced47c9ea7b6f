"""How far the median of another run may lie from this one's, told by visits that lie seconds apart.

Quartiles hold half of the samples of a moment, and know nothing of what changes between moments: clocks,
other programs, where memory lies. A run that comes back to each number sees that from visit to visit.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.laws.arguments import check

SHARE = 0.9
"""Of the repeated measurements that a range holds."""
COMMON_DEGREES = 4
"""As many degrees of freedom of its own count as much as the drift that all numbers of a run have in common.

Source: chosen; with 2 or 4, of ten quick profiles of two busy cores, numbers of another run were within the
ranges in 92 of 100 cases.
"""
FLOOR = 0.005
"""Share of the median that every range reaches: numbers that agree in the three digits shown are alike."""
_QUANTILE = statistics.NormalDist().inv_cdf((1.0 + SHARE) / 2.0)


class RepeatRange(NamedTuple):
    """The median of a repeated measurement lies between these with a probability of `SHARE`."""

    low: float
    high: float


def relative_drift(medians: Sequence[float]) -> float | None:
    """Standard deviation of the visits' medians as a share of their mean; None of one visit, and around 0."""
    mean = statistics.fmean(medians)
    return statistics.stdev(medians) / mean if len(medians) > 1 and mean > 0.0 else None


def common_drift(drifts: Sequence[float], visits: int) -> float:
    """The drift of a usual number of a run; 0 without any.

    Args:
        drifts: Of its numbers, see `relative_drift`.
        visits: How many each one had; at least 2.

    Source: the median of a chi-squared variable by Wilson and Hilferty (1931), since of few visits most
        deviate less than they do on average.
    """
    degrees = check("number of visits", visits, least=2) - 1
    usual = (1.0 - 2.0 / (9.0 * degrees)) ** 1.5
    return statistics.median(drifts) / usual if drifts else 0.0


def repeat_range(middle: float, medians: Sequence[float], common: float) -> RepeatRange:
    """Where the median of another run lies, with a probability of `SHARE`.

    The variance is that of the visits' medians, and of the drift that all numbers of the run have in common,
    weighted by degrees of freedom: three visits alone would often agree by chance. A run counts as much as
    one of its visits, since what changes slower than a run lasts is alike in all of them.

    Args:
        middle: The median of this run, at least 0.
        medians: Of its visits, at least one.
        common: See `common_drift`, as a share of the median.

    Source: the moderated variance of Smyth (2004), "Linear models and empirical Bayes methods"; Student's
        distribution by the expansion of Cornish and Fisher, from 4 degrees on within 1 %.

    Raises:
        LawError: `middle` or `common` is below 0.
    """
    check("median", middle, least=0.0)
    check("common drift", common, least=0.0)
    own = statistics.variance(medians) if len(medians) > 1 else 0.0
    degrees = COMMON_DEGREES + len(medians) - 1
    variance = COMMON_DEGREES * (common * middle) ** 2 + (len(medians) - 1) * own
    # Twice, since both medians deviate: that of this run and that of the other.
    deviation = math.sqrt(2.0 * variance / degrees)
    reach = max(FLOOR * middle, _student(degrees) * deviation)
    return RepeatRange(max(0.0, middle - reach), middle + reach)


def _student(degrees: int) -> float:
    """The quantile of Student's distribution that `SHARE` lies within, both ways."""
    z = _QUANTILE
    first, second = (z**3 + z) / 4.0, (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    return z + first / degrees + second / degrees**2
