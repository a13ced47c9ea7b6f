"""The roofline: how fast a task can run, from its intensity and two ceilings of the machine.

Below the ridge point the memory (or the link) cannot feed the computing unit and sets the speed; above
it the computing unit does. At the ridge point both are busy and neither is wasted.
"""

from ridgeline.laws.arguments import check


def roofline(intensity: float, peak_flops_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """Attainable FLOP/s of a task: the smaller of the peak and `bandwidth * intensity`.

    Args:
        intensity: FLOP per byte moved, at least 0.
        peak_flops_per_s: Most FLOP/s of the computing unit.
        bandwidth_bytes_per_s: Most bytes/s of the memory (or link) that feeds it.

    Raises:
        LawError: a number is negative, zero where it must not be, or not finite.

    Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for
        multicore architectures", CACM 52(4), 2009.

    Example:
        >>> roofline(2.0, 100e9, 20e9)
        40000000000.0
    """
    check("intensity", intensity, least=0.0)
    return min(
        check("peak_flops_per_s", peak_flops_per_s, above=0.0),
        check("bandwidth_bytes_per_s", bandwidth_bytes_per_s, above=0.0) * intensity,
    )


def ridge_point(peak_flops_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """Intensity, in FLOP per byte, from which on the computing unit sets the speed.

    Args:
        peak_flops_per_s: Most FLOP/s of the computing unit.
        bandwidth_bytes_per_s: Most bytes/s of the memory (or link) that feeds it.

    Raises:
        LawError: a number is not positive and finite.

    Source: Williams, Waterman, Patterson, CACM 52(4), 2009.

    Example:
        >>> ridge_point(100e9, 20e9)
        5.0
    """
    check("peak_flops_per_s", peak_flops_per_s, above=0.0)
    return peak_flops_per_s / check("bandwidth_bytes_per_s", bandwidth_bytes_per_s, above=0.0)


def roofline_seconds(
    flops: float, num_bytes: float, peak_flops_per_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Least seconds of a task whose computing and traffic overlap perfectly.

    Args:
        flops: FLOP of the task, at least 0.
        num_bytes: Bytes it must move, at least 0.
        peak_flops_per_s: Most FLOP/s of the computing unit.
        bandwidth_bytes_per_s: Most bytes/s of the memory.

    Raises:
        LawError: a number is negative, zero where it must not be, or not finite.

    Source: the roofline solved for time, `max(F / pi, Q / beta)`.

    Example:
        >>> roofline_seconds(100e9, 10e9, 100e9, 20e9)
        1.0
    """
    check("flops", flops, least=0.0)
    check("num_bytes", num_bytes, least=0.0)
    return max(
        flops / check("peak_flops_per_s", peak_flops_per_s, above=0.0),
        num_bytes / check("bandwidth_bytes_per_s", bandwidth_bytes_per_s, above=0.0),
    )
