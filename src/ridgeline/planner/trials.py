"""Which plans are worth running for real, and how many of them a run has room for."""

import math
from collections.abc import Collection, Sequence

import msgspec

from ridgeline import units
from ridgeline.execution import MODES
from ridgeline.planner.knobs import num_changes
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.ranking import Candidate

ASSUMED_ERROR = 0.05
"""Fraction by which a prediction is taken to be off when no trial has told.

Source: assumed; the median that simulators calibrated on the same machine reach.
"""
SAME_PLAN_MARGIN = 0.02
"""Plans alike but for their buckets are both tried only when predicted to differ by more than this."""
STEPS_PER_TRIAL = 15
MOST_TRIAL_SHARE = 0.25
"""Trials may take this share of a run whose number of steps is known."""


def pick_trials(
    candidates: Sequence[Candidate],
    tries: int,
    *,
    steps: int | None = None,
    budget_s: float = math.inf,
) -> tuple[int, ...]:
    """Indices of the candidates worth a trial.

    First the best of every kind (plans alike but for their buckets, or for how their one program is
    called, are of one kind), the simplest among those that are predicted to take equal time; then others
    of a kind that differ noticeably. The best plan that compiles nothing is always among them, and one that
    compiles only if it is predicted to be faster than that by more than predictions are off.

    Args:
        candidates: Best first.
        tries: Most of them.
        steps: Steps of the run, if known.
        budget_s: Seconds of expected compiling that they may take together.
    """
    kinds: dict[int, list[int]] = {}
    for index, candidate in enumerate(candidates):
        kind = next((k for k in kinds if _is_same_kind(candidates[k], candidate)), index)
        kinds.setdefault(kind, []).append(index)
    first = [
        _simplest([i for i in g if _is_equal(candidates, i, k)], candidates)
        for k, g in kinds.items()
    ]
    plain = [i for i in first if not is_compiled(candidates[i].plan)][:1]
    most_s = min((candidates[i].cost_s(steps) for i in plain), default=math.inf)
    picked: list[int] = []
    for index in (*first, *range(len(candidates))):
        mine = candidates[index]
        room = tries - len(picked) - sum(i not in (*picked, index) for i in plain)
        is_equal = index not in first and any(
            _is_same_kind(mine, candidates[i]) and _is_equal(candidates, index, i) for i in picked
        )
        if room < 1 or is_equal or index in picked:
            continue
        if is_compiled(mine.plan):
            if mine.compile_s > budget_s or mine.cost_s(steps) > most_s * (1.0 - ASSUMED_ERROR):
                continue
            budget_s -= mine.compile_s
        picked.append(index)
    return tuple(sorted(picked))


def _is_same_kind(mine: Candidate, other: Candidate) -> bool:
    execution = mine.plan.execution
    if all(MODES[c.plan.execution].is_one_program for c in (mine, other)):
        execution = other.plan.execution
    alike = msgspec.structs.replace(mine.plan, sync=other.plan.sync, execution=execution)
    return alike == other.plan


def _is_equal(candidates: Sequence[Candidate], mine: int, other: int) -> bool:
    slower, faster = sorted((candidates[mine].sample_s, candidates[other].sample_s), reverse=True)
    return slower <= faster * (1.0 + SAME_PLAN_MARGIN)


def _simplest(indices: Sequence[int], candidates: Sequence[Candidate]) -> int:
    return min(indices, key=lambda i: (num_changes(candidates[i].plan), candidates[i].sample_s))


def num_tries(tries: int, steps: int | None) -> int:
    """Trials that a run of known length has room for."""
    if steps is None:
        return tries
    return min(tries, int(MOST_TRIAL_SHARE * steps / STEPS_PER_TRIAL))


def left_untried(
    candidates: Sequence[Candidate], picked: Collection[int], budget_s: float
) -> list[str]:
    """Says which modes were not tried because compiling them takes too long."""
    tried = {candidates[i].plan.execution for i in picked}
    dear = {
        c.plan.execution: c.compile_s
        for c in reversed(candidates)
        if is_compiled(c.plan) and c.plan.execution not in tried
    }
    limit = f"trials may spend {units.seconds(budget_s)} on compiling"
    if not budget_s:
        limit = "trials compile nothing on a CPU while the number of steps is unknown"
    return [
        f"{execution} was not tried: compiling it takes about {units.seconds(seconds)}, and {limit}"
        for execution, seconds in reversed(dear.items())
        if seconds > budget_s
    ]
