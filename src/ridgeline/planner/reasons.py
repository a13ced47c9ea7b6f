"""The record of reasons: why every knob of the chosen plan has its value, and what others would cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline import units
from ridgeline.execution import MODES
from ridgeline.plan import Alternative, Choice, Origin
from ridgeline.planner.exchanges.exchanges import APART_PERMISSION, GIVEN, PERMISSION, SEARCHED
from ridgeline.planner.knobs import INEXACT, KNOBS, value_of
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import (
    COMPILED_ERROR,
    earning_words,
    is_compiled,
    preparing_words,
    sum_words,
)
from ridgeline.planner.ranking import Candidate, ratio
from ridgeline.synchronisation import DEFAULT_BUCKET_BYTES, LEAST_GAIN

EXCHANGED = (PERMISSION, APART_PERMISSION)
"""Permissions that are named with the knobs of exchanges."""


def make_choices(
    best: Candidate,
    candidates: Sequence[Candidate],
    fixed: Mapping[str, Any],
    error: float,
    steps: int | None = None,
) -> tuple[Choice, ...]:
    """One choice a knob, in the order of `KNOBS`; then those that follow from others, where they are set.

    Differences below the fraction `error` decide nothing; with known `steps`, whole runs are compared.
    """
    set_ = [knob for knob in GIVEN if knob in fixed or getattr(best.plan.sync, knob)]
    knobs = (*KNOBS, *set_)
    return tuple(_choice(knob, best, candidates, fixed, error, steps) for knob in knobs)


def why(
    candidate: Candidate,
    best: Candidate,
    fastest: Candidate,
    margin: float,
    candidates: Sequence[Candidate],
    steps: int | None = None,
) -> str:
    """Why a candidate stands where it stands, in a sentence.

    `fastest` has the least time, and is another than `best` where a simpler plan is as good; differences
    below the fraction `margin` decide nothing. With known `steps` it says `total = compile + steps x step`.
    """
    if candidate.failure:
        return f"failed when tried: {candidate.failure}"
    how = "measured" if candidate.measured else "predicted"
    run = _run_words(candidate, candidates, steps)
    if candidate is best and best is fastest:
        return f"the fastest {how}: {units.seconds(best.step_s)} a step{run}"
    if candidate is best:
        gain = 1.0 - fastest.cost_s(steps) / best.cost_s(steps)
        return (
            f"{how} {units.seconds(best.step_s)} a step{run}; {label(fastest.plan)} would be "
            f"{units.percent(gain)} faster, which is {_too_little(best, fastest, margin)}, so the simpler "
            "plan is kept"
        )
    times = units.digits3(ratio(candidate, best))
    if candidate.measured is None and best.measured is not None:
        return f"not tried; predicted {times} x the time per sample of the chosen plan{run}"
    return f"{how} {times} x the time per sample of the chosen plan{run}"


def _run_words(candidate: Candidate, candidates: Sequence[Candidate], steps: int | None) -> str:
    """What the whole run takes, or what preparing costs when its length is unknown."""
    if steps is None:
        words = preparing_words(candidate, candidates)
        return f"; {words}" if words else ""
    earned = earning_words(candidate, candidates)
    return f"; the run takes {sum_words(candidate, steps)}{f', {earned}' if earned else ''}"


def _choice(
    knob: str,
    best: Candidate,
    candidates: Sequence[Candidate],
    fixed: Mapping[str, Any],
    error: float,
    steps: int | None,
) -> Choice:
    value = value_of(best.plan, knob)

    def worth(candidate: Candidate) -> tuple[bool, float]:
        """What was measured speaks for its value: before a twin that was not tried."""
        return candidate.measured is None, candidate.cost_s(steps)

    others: dict[str, Candidate] = {}
    for candidate in candidates:
        other = value_of(candidate.plan, knob)
        if other == value or candidate.failure or not _is_comparable(knob, best, candidate):
            continue
        known = others.get(other)
        if known is None or worth(candidate) < worth(known):
            others[other] = candidate
    # By the cost that the ranking uses, so that the first alternative is the true runner-up.
    ordered = sorted(others.items(), key=lambda item: item[1].cost_s(steps))
    alternatives = tuple(
        Alternative(value=text, step_s=c.step_s, is_measured=c.measured is not None)
        for text, c in ordered
    )
    origin: Origin = "default"
    if knob in fixed:
        origin, reason = "user", "set by the user"
    elif ordered:
        origin, reason = "search", _compared(best, ordered[0][1], ordered[0][0], error, steps)
    else:
        reason = _default_reason(knob, best)
        if knob == "accumulate" and best.plan.accumulate > 1:
            origin = "search"
    return Choice(knob=knob, value=value, origin=origin, reason=reason, alternatives=alternatives)


def _is_comparable(knob: str, best: Candidate, other: Candidate) -> bool:
    """Whether another value of the knob means the same thing: an exchange belongs to a number of workers."""
    if knob in (*SEARCHED, *GIVEN):
        return best.plan.workers == other.plan.workers
    if knob != "bucket_bytes":
        return True
    return (best.plan.workers, best.plan.execution) == (other.plan.workers, other.plan.execution)


def _compared(
    best: Candidate, other: Candidate, value: str, error: float, steps: int | None
) -> str:
    """How the best plan with another value compares."""
    how = "measured" if best.measured and other.measured else "predicted"
    times = ratio(other, best)
    short = value if len(value) <= 40 else f"{value[:37]}..."
    if steps is not None and (best.compile_s or other.compile_s):
        untried = ", predicted and not tried" if best.measured and not other.measured else ""
        return (
            f"over {steps} steps this takes {sum_words(best, steps)}, the best plan with {short} "
            f"{sum_words(other, steps)}{untried}"
        )
    if times > 1.0 + error:
        return f"{how} {units.digits3(times)} x as fast as the best plan with {short}"
    if times < 1.0:
        # Compilers were not seen at work here, so their predictions are doubted more.
        if how == "predicted" and is_compiled(other.plan):
            error = max(error, COMPILED_ERROR)
        gain = units.percent(1 - times)
        least = LEAST_GAIN if _trains_longer(best, other, error) else error
        if not other.measured and (best.measured or 1 - times > least):
            return f"the best plan with {short} is predicted {gain} faster, but was not tried"
        return (
            f"the best plan with {short} is {how} {gain} faster, which is "
            f"{_too_little(best, other, error)}: the simpler plan is kept"
        )
    return (
        f"no difference to {short} beyond the uncertainty of {units.percent(error)} "
        f"({how} {units.percent(times - 1)} slower)"
    )


def _too_little(best: Candidate, other: Candidate, error: float) -> str:
    """Why a gain does not decide, to follow `which is`."""
    if _trains_longer(best, other, error):
        return (
            f"less than the {units.percent(LEAST_GAIN)} by which workers that train alone for longer must be "
            "faster"
        )
    return f"within the uncertainty of {units.percent(error)}"


def _trains_longer(best: Candidate, other: Candidate, error: float) -> bool:
    """Whether a plan was not left for noise but for what it does to the maths."""
    return other.plan.sync.every > best.plan.sync.every and error < LEAST_GAIN


def _default_reason(knob: str, best: Candidate) -> str:
    plan = best.plan
    if plan.workers == 1 and knob in ("algorithm", "compression", "every", "bucket_bytes"):
        return "no gradients are exchanged"
    if knob == "accumulate":
        if plan.accumulate > 1:
            return f"the whole batch does not fit in memory; {plan.accumulate} micro-batches do"
        return "the whole batch fits in memory at once"
    return {
        "workers": "no other number of workers was described or fits",
        "threads": "an equal share of the cores for every worker"
        if plan.threads
        else "left as it is: the GPU computes",
        "execution": "no other mode was compared",
        "precision": "exact: nothing that changes the maths was allowed "
        f"(possible: {', '.join(name for name in INEXACT if name not in EXCHANGED)})",
        "memory_format": "no images are convolved, or random numbers would be assigned to other elements",
        "optimizer": "a captured step takes its fused form by itself"
        if MODES[plan.execution].is_replayed
        else "no other form was compared",
        "kernels": "the compiler's own" if is_compiled(plan) else "nothing is compiled",
        "random": "compiled programs may draw their own, and another order of memory may place them"
        if plan.random != "as-is"
        else "those that the eager step draws",
        "algorithm": "no other exact algorithm is known to be faster here (see the notes)",
        "compression": "exact: no loss was allowed, or no compression is offered here "
        f"(possible: {PERMISSION})",
        "every": "exact: workers were not allowed to train alone in between, or cannot here "
        f"(possible: {APART_PERMISSION})",
        "options": "they are set with the interval"
        if plan.sync.every > 1
        else "they are set with the algorithm, or the compression",
        "bucket_bytes": "no other cut makes sense for these gradients"
        if plan.sync.bucket_bytes == DEFAULT_BUCKET_BYTES
        else "all in one: messages take from computing what they hide behind it",
        "depth": "two batches ahead hide loading that is faster than a step",
    }[knob]
