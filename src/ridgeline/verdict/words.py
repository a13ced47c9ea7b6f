"""What the verdict says: what binds the step, why, and what to do about it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ridgeline import units
from ridgeline.verdict.waterfall import (
    EXPOSED,
    IDEAL,
    INPUT,
    KERNEL,
    LAUNCH,
    MEMORY,
    OTHER,
    Part,
)


class Words(NamedTuple):
    """The three lines of a verdict."""

    verdict: str
    why: str
    next: str


class _Kind(NamedTuple):
    name: str
    parts: tuple[str, ...]
    what: str
    gain_parts: tuple[str, ...]
    advice: str


_KINDS = (
    _Kind(
        "COMPUTE-BOUND",
        (IDEAL, KERNEL),
        "computing",
        (KERNEL,),
        "let operators do more at once (a larger batch per worker), add workers, or allow a lower "
        "precision",
    ),
    _Kind(
        "MEMORY-BOUND",
        (MEMORY,),
        "moving bytes",
        (MEMORY,),
        "move fewer bytes: fuse elementwise operators or allow a lower precision",
    ),
    _Kind(
        "LAUNCH-BOUND",
        (LAUNCH,),
        "issuing operators",
        (LAUNCH,),
        "issue fewer operators: a larger batch per worker, or the whole step as one graph on a GPU",
    ),
    _Kind(
        "COMMUNICATION-BOUND",
        (EXPOSED,),
        "exposed communication",
        (EXPOSED,),
        "hide or shorten communication: other bucket sizes, a larger batch per worker, fewer workers",
    ),
    _Kind(
        "INPUT-BOUND",
        (INPUT,),
        "waiting for input",
        (INPUT,),
        "prepare input faster or further ahead: more loader workers or a deeper feed",
    ),
    _Kind(
        "UNEXPLAINED",
        (OTHER,),
        "not explained by the model",
        (),
        "look at the timeline for what runs between the frames, and measure the machine again",
    ),
)


def words_for(
    parts: Sequence[Part],
    *,
    step_ns: int,
    error: float,
    spread: float,
    steps: int,
    predicted_ns: int,
) -> Words:
    """Three lines about a measured step.

    Args:
        parts: Its waterfall.
        step_ns: Its duration.
        error: Predicted over measured, minus 1.
        spread: Distance of the quartiles of the measured steps over their median.
        steps: Number of measured steps.
        predicted_ns: The predicted step.
    """
    length = {part.name: part.ns for part in parts}
    kind = max(_KINDS, key=lambda k: sum(length[name] for name in k.parts))
    share = sum(length[name] for name in kind.parts) / step_ns
    why = (
        f"a step takes {units.nanoseconds(step_ns)} (median of {steps}, spread {units.percent(spread)}) "
        f"and was predicted to take {units.nanoseconds(predicted_ns)} ({100 * error:+.1f} %)"
    )
    losses = [part for part in parts if part.name not in (IDEAL, MEMORY) and part.ns > 0]
    if losses:
        worst = max(losses, key=lambda part: part.ns)
        why += (
            f"; the largest loss is {worst.name}, {units.nanoseconds(worst.ns)} or "
            f"{units.percent(worst.ns / step_ns)}"
        )
    return Words(
        f"{kind.name}: {units.percent(share)} of the step is {kind.what}",
        why,
        f"{kind.advice}; {_gain(kind, length, step_ns, max(abs(error), spread))}",
    )


def _gain(kind: _Kind, length: Mapping[str, int], step_ns: int, doubt: float) -> str:
    """What could be gained, claimed only when it exceeds what prediction and measurement leave open."""
    share = sum(length[name] for name in kind.gain_parts) / step_ns
    if not kind.gain_parts:
        return "no gain is claimed for what is not understood"
    if share <= 0.0:
        return "no gain is claimed: the step is at its limit there"
    if share <= doubt:
        return (
            f"no gain is claimed: {units.percent(share)} of the step is within the uncertainty of "
            f"{units.percent(doubt)}"
        )
    if share >= 1.0:
        return "no gain is claimed: without it nothing would be left of the step"
    return f"at most {units.digits3(1 / (1 - share))} x if all of it went away"
