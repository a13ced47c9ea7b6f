"""The record of reasons: why every knob of the chosen plan has its value, and what others would cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline import units
from ridgeline.plan import Alternative, Choice, Origin
from ridgeline.planner.knobs import INEXACT, KNOBS, value_of
from ridgeline.planner.ranking import Candidate, ratio


def make_choices(
    best: Candidate,
    candidates: Sequence[Candidate],
    fixed: Mapping[str, Any],
    error: float,
) -> tuple[Choice, ...]:
    """One choice a knob, in the order of `KNOBS`.

    Args:
        best: The chosen candidate.
        candidates: All that were compared.
        fixed: Knobs that the user set.
        error: Fraction below which differences decide nothing.
    """
    return tuple(_choice(knob, best, candidates, fixed, error) for knob in KNOBS)


def _choice(
    knob: str,
    best: Candidate,
    candidates: Sequence[Candidate],
    fixed: Mapping[str, Any],
    error: float,
) -> Choice:
    value = value_of(best.plan, knob)
    others: dict[str, Candidate] = {}
    for candidate in candidates:
        other = value_of(candidate.plan, knob)
        if other == value or candidate.failure or not _is_comparable(knob, best, candidate):
            continue
        known = others.get(other)
        if known is None or candidate.sample_s < known.sample_s:
            others[other] = candidate
    ordered = sorted(others.items(), key=lambda item: item[1].sample_s)
    alternatives = tuple(
        Alternative(value=text, step_s=c.step_s, is_measured=c.measured is not None)
        for text, c in ordered
    )
    origin: Origin = "default"
    if knob in fixed:
        origin, reason = "user", "set by the user"
    elif ordered:
        origin, reason = "search", _compared(best, ordered[0][1], ordered[0][0], error)
    else:
        reason = _default_reason(knob, best)
        if knob == "accumulate" and best.plan.accumulate > 1:
            origin = "search"
    return Choice(knob=knob, value=value, origin=origin, reason=reason, alternatives=alternatives)


def _is_comparable(knob: str, best: Candidate, other: Candidate) -> bool:
    """Whether another value of the knob means the same thing: buckets belong to a number of workers."""
    if knob != "bucket_bytes":
        return True
    return (best.plan.workers, best.plan.execution) == (other.plan.workers, other.plan.execution)


def _compared(best: Candidate, other: Candidate, value: str, error: float) -> str:
    """How the best plan with another value compares."""
    how = "measured" if best.measured and other.measured else "predicted"
    times = ratio(other, best)
    short = value if len(value) <= 40 else f"{value[:37]}..."
    if times > 1.0 + error:
        return f"{how} {units.digits3(times)} x as fast as the best plan with {short}"
    if times < 1.0:
        return (
            f"the best plan with {short} is {how} {units.percent(1 - times)} faster, which is within the "
            f"uncertainty of {units.percent(error)}: the simpler plan is kept"
        )
    return (
        f"no difference to {short} beyond the uncertainty of {units.percent(error)} "
        f"({how} {units.percent(times - 1)} slower)"
    )


def _default_reason(knob: str, best: Candidate) -> str:
    plan = best.plan
    if knob == "accumulate":
        if plan.accumulate > 1:
            return f"the whole batch does not fit in memory; {plan.accumulate} micro-batches do"
        return "the whole batch fits in memory at once"
    return {
        "workers": "no other number of workers was described or fits",
        "threads": "an equal share of the cores for every worker"
        if plan.threads
        else "left as it is: the GPU computes",
        "execution": "the only mode that this release runs on this device",
        "precision": "exact: nothing that changes the maths was allowed "
        f"(possible: {', '.join(INEXACT)})",
        "bucket_bytes": "no gradients are exchanged"
        if plan.workers == 1
        else "no other cut makes sense for these gradients",
        "depth": "two batches ahead hide loading that is faster than a step",
    }[knob]
