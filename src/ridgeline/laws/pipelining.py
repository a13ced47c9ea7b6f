"""Pipelining: what is gained when communication and computing, or stages, work at the same time.

Amdahl's limit comes from doing one after the other. When the next piece is fetched while this one is
computed, only the larger of the two is left, and above the ridge point that is the computing.
"""

import math

from ridgeline.laws.arguments import check
from ridgeline.laws.roofline import roofline


def pipelined_seconds(
    compute_s: float, communication_s: float, *, pieces: float = math.inf
) -> float:
    """Seconds to fetch and compute something that is cut in `pieces` equal pieces.

    The first piece must be fetched before anything is computed, and the last is computed after
    everything was fetched; in between the slower unit sets the pace.

    Args:
        compute_s: Seconds of all the computing.
        communication_s: Seconds of all the communication.
        pieces: Number of pieces, at least 1; 1 is one after the other, infinity a perfect overlap.

    Raises:
        LawError: a number is out of range.

    Source: two-stage pipeline, `(c + m) / n + (n - 1) / n * max(c, m)`; Hennessy, Patterson,
        "Computer Architecture: A Quantitative Approach", appendix C.

    Example:
        >>> pipelined_seconds(9.0, 1.0), pipelined_seconds(9.0, 1.0, pieces=1)
        (9.0, 10.0)
    """
    check("compute_s", compute_s, least=0.0)
    check("communication_s", communication_s, least=0.0)
    check("pieces", pieces, least=1.0, is_finite=False)
    return _overlapped(compute_s, communication_s, pieces)


def pipelined_speedup(
    compute_s: float, communication_s: float, speedup: float = 1.0, *, pieces: float = math.inf
) -> float:
    """Gain of pipelining and of a computing unit `speedup` times as fast, over one after the other.

    Amdahl's law gives 2.5 for 9 s of computing, 1 s of communication and a unit 3 times as fast;
    pipelined it is 3.33, and the limit of 10 is reached at 9 times instead of never.

    Args:
        compute_s: Seconds of all the computing with the original unit.
        communication_s: Seconds of all the communication.
        speedup: How much faster the computing unit is made.
        pieces: See `pipelined_seconds`.

    Raises:
        LawError: a number is out of range.

    Source: ratio of the sequential time to `pipelined_seconds`.

    Example:
        >>> round(pipelined_speedup(9.0, 1.0, 3.0), 3), pipelined_speedup(9.0, 1.0, 9.0)
        (3.333, 10.0)
    """
    before = pipelined_seconds(compute_s, communication_s, pieces=1)
    check("sum of compute_s and communication_s", before)
    check("pieces", pieces, least=1.0, is_finite=False)
    check("speedup", speedup, above=0.0)
    # Not checked: a quotient of numbers in range may itself be too large or too small for a float.
    after = _overlapped(compute_s / speedup, communication_s, pieces)
    if before == 0.0:
        return 1.0
    return before / after if after else math.inf


def pipelined_parallel_fraction(
    intensity: float, peak_flops_per_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Amdahl's parallel fraction of a perfectly pipelined task: `min(1, beta * I / pi)`.

    Above the ridge point it is 1 and the speed-up linear; below it the communication that computing
    cannot hide is the serial part.

    Args:
        intensity: FLOP per byte, at least 0.
        peak_flops_per_s: Most FLOP/s of the computing unit.
        bandwidth_bytes_per_s: Most bytes/s that feed it.

    Raises:
        LawError: a number is out of range.

    Source: share of the roofline time in which the computing unit works.

    Example:
        >>> pipelined_parallel_fraction(2.5, 100e9, 20e9)
        0.5
    """
    # Of the attainable rate, since a ridge point may be too small for a float.
    return roofline(intensity, peak_flops_per_s, bandwidth_bytes_per_s) / peak_flops_per_s


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Share of the time in which a stage of a 1F1B pipeline idles.

    Args:
        stages: Equal stages, at least 1.
        micro_batches: Micro-batches per step, at least 1.

    Raises:
        LawError: a number is out of range.

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
        Megatron-LM", SC 2021, section 2.2: (p - 1) of (m + p - 1) slots.

    Example:
        >>> pipeline_bubble(4, 12)
        0.2
    """
    check("stages", stages, least=1)
    check("micro_batches", micro_batches, least=1)
    return (stages - 1) / (micro_batches + stages - 1)


def pipeline_seconds(stages: int, micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Seconds of a step on a 1F1B pipeline: `(m + p - 1) * (f + b)`.

    Args:
        stages: Equal stages, at least 1.
        micro_batches: Micro-batches per step, at least 1.
        forward_s: Forward seconds of one stage and one micro-batch.
        backward_s: Backward seconds likewise.

    Raises:
        LawError: a number is out of range.

    Source: Narayanan et al., SC 2021, section 2.2.

    Example:
        >>> pipeline_seconds(2, 3, 1.0, 2.0)
        12.0
    """
    check("stages", stages, least=1)
    check("micro_batches", micro_batches, least=1)
    check("forward_s", forward_s, least=0.0)
    check("backward_s", backward_s, least=0.0)
    return (micro_batches + stages - 1) * (forward_s + backward_s)


def prefetched_step_seconds(
    load_s: float, step_s: float, *, loaders: int = 1, depth: int = 2
) -> float:
    """Seconds per step in the steady state when batches are loaded ahead.

    Args:
        load_s: Seconds one loader takes for a batch.
        step_s: Seconds the device takes for a step.
        loaders: Loaders working side by side, at least 1.
        depth: Batches prepared ahead by all of them together (`DataLoader` counts its `prefetch_factor` for
            each loader); 0 loads between the steps. Loaders beyond it have nothing to do.

    Raises:
        LawError: a number is out of range.

    Source: bottleneck of a two-stage pipeline, `max(load / min(loaders, depth), step)`; at depth 0 the sum.

    Example:
        >>> prefetched_step_seconds(0.3, 0.2, loaders=2), prefetched_step_seconds(0.3, 0.2, depth=0)
        (0.2, 0.5)
    """
    check("load_s", load_s, least=0.0)
    check("step_s", step_s, least=0.0)
    check("loaders", loaders, least=1)
    check("depth", depth, least=0)
    return load_s + step_s if depth == 0 else max(load_s / min(loaders, depth), step_s)


def _overlapped(compute_s: float, communication_s: float, pieces: float) -> float:
    """Seconds of two units of which the slower one waits for one piece of the other."""
    longer, shorter = max(compute_s, communication_s), min(compute_s, communication_s)
    # The two-stage formula in short: the longer one, and the shorter one for one piece.
    return longer + shorter / pieces
