"""`choose`: enumerate plans, prune by memory, rank by simulation, try the best, and say why."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from ridgeline import units
from ridgeline.errors import MachineError, PlanError, RidgelineError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner.knobs import (
    Pruned,
    Request,
    enumerate_plans,
    make_request,
    num_changes,
)
from ridgeline.planner.ranking import Candidate, Ranking, label, ratio
from ridgeline.planner.reasons import make_choices
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.verdict import step_spread, verify
from ridgeline.workload import Workload

Trial = Callable[[Plan], Timeline]

ASSUMED_ERROR = 0.05
"""Fraction by which a prediction is taken to be off when no trial has told.

Source: assumed; the median that simulators calibrated on the same machine reach.
"""
SAME_PLAN_MARGIN = 0.02
"""Plans alike but for their buckets are both tried only when predicted to differ by more than this."""
STEPS_PER_TRIAL = 15
MOST_TRIAL_SHARE = 0.25
"""Trials may take this share of a run whose number of steps is known."""


def choose(
    machine: Machine,
    workload: Workload | Mapping[int, Workload],
    *,
    world_size: int | None = None,
    fixed: Mapping[str, object] | None = None,
    allow: Collection[str] = (),
    steps: int | None = None,
    trial: Trial | None = None,
    tries: int = 3,
) -> Ranking:
    """The plans for a workload, best first, with the reasons for every knob of the first.

    Args:
        machine: The measured machine.
        workload: What each worker does: one workload, run by `world_size` workers; or one by number of
            workers, of one global batch, from which the number of workers is chosen too.
        world_size: Workers there are (with one workload: workers there will be).
        fixed: Knobs that the user sets: `workers`, `threads`, `execution`, `precision`, `accumulate`,
            `bucket_bytes`, `depth`.
        allow: Changes of the maths that may be chosen: `tf32`, `bf16`. Nothing inexact is otherwise.
        steps: Steps of the run, if known: trials are limited to a quarter of it.
        trial: Runs a plan for some steps and returns the measured timeline; None ranks by prediction.
        tries: Most trials.

    Returns:
        All plans that were simulated: those tried first, by measured time per sample; then the others by
        prediction; failed ones last. A plan that is faster by less than the uncertainty does not
        displace a simpler one.

    Raises:
        PlanError: a fixed knob is unknown or impossible, no plan fits in memory, or every trial failed
            that the user's knobs leave.
        MachineError: the profile lacks what every plan needs.

    Cost: Simulations take milliseconds each; trials run the step for real.
    """
    request = make_request(machine, workload, world_size, fixed or {}, allow)
    plans, pruned = enumerate_plans(request)
    if not plans:
        raise _nothing_fits(pruned, request)
    candidates, notes = _simulated(request, plans)
    notes += [f"left out: {label(p.plan)}: {p.reason}" for p in pruned]
    error = ASSUMED_ERROR
    if trial is not None and candidates:
        picked = pick_trials(candidates, _num_tries(tries, steps))
        candidates, error = _tried(candidates, picked, trial)
    return _ranked(request, candidates, error, notes)


def pick_trials(candidates: Sequence[Candidate], tries: int) -> tuple[int, ...]:
    """Indices of the candidates worth a trial.

    First the best of every kind (plans alike but for their buckets are of one kind), the simplest among
    those that are predicted to take equal time; then others of a kind that differ noticeably.

    Args:
        candidates: Best first.
        tries: Most of them.
    """
    kinds: dict[int, list[int]] = {}
    for index, candidate in enumerate(candidates):
        kind = next((k for k in kinds if _is_same_kind(candidates[k], candidate)), index)
        kinds.setdefault(kind, []).append(index)
    first = [
        _simplest([i for i in g if _is_equal(candidates, i, k)], candidates)
        for k, g in kinds.items()
    ]
    picked = first[:tries]
    for index in range(len(candidates)):
        if len(picked) < tries and not any(
            _is_same_kind(candidates[index], candidates[i]) and _is_equal(candidates, index, i)
            for i in picked
        ):
            picked.append(index)
    return tuple(sorted(picked))


def _is_same_kind(mine: Candidate, other: Candidate) -> bool:
    return msgspec.structs.replace(mine.plan, sync=other.plan.sync) == other.plan


def _is_equal(candidates: Sequence[Candidate], mine: int, other: int) -> bool:
    slower, faster = sorted((candidates[mine].sample_s, candidates[other].sample_s), reverse=True)
    return slower <= faster * (1.0 + SAME_PLAN_MARGIN)


def _simplest(indices: Sequence[int], candidates: Sequence[Candidate]) -> int:
    return min(indices, key=lambda i: (num_changes(candidates[i].plan), candidates[i].sample_s))


def _num_tries(tries: int, steps: int | None) -> int:
    if steps is None:
        return tries
    return min(tries, int(MOST_TRIAL_SHARE * steps / STEPS_PER_TRIAL))


def _simulated(request: Request, plans: Sequence[Plan]) -> tuple[list[Candidate], list[str]]:
    """Candidates by predicted time per sample, and what could not be predicted."""
    found: list[Candidate] = []
    notes: list[str] = []
    errors: list[MachineError] = []
    for plan in plans:
        workload = request.workloads[plan.workers]
        try:
            timeline = simulate(request.machine, workload, plan, details=False)
        except MachineError as error:
            errors.append(error)
            notes.append(f"left out: {label(plan)}: {error}")
            continue
        samples = workload.samples * plan.workers
        found.append(Candidate(plan=plan, timeline=timeline, why="", samples=samples))
    if not found:
        raise errors[0]
    return sorted(found, key=lambda c: (c.sample_s, num_changes(c.plan))), notes


def _tried(
    candidates: Sequence[Candidate], picked: Collection[int], trial: Trial
) -> tuple[list[Candidate], float]:
    """The candidates with what the trials measured, and the largest miss of their predictions."""
    tried: list[Candidate] = []
    misses: list[float] = []
    for index, candidate in enumerate(candidates):
        if index not in picked:
            tried.append(candidate)
            continue
        try:
            measured = trial(candidate.plan)
            misses.append(abs(verify(candidate.timeline, measured).error))
        except RidgelineError as error:
            tried.append(msgspec.structs.replace(candidate, failure=str(error)))
        else:
            tried.append(msgspec.structs.replace(candidate, measured=measured))
    return tried, max(misses, default=ASSUMED_ERROR)


def _ranked(
    request: Request, candidates: Sequence[Candidate], error: float, notes: Sequence[str]
) -> Ranking:
    usable = sorted(
        (c for c in candidates if not c.failure),
        key=lambda c: (c.measured is None, c.sample_s, num_changes(c.plan)),
    )
    failed = [c for c in candidates if c.failure]
    if not usable:
        raise PlanError(
            f"wanted a plan that runs, got {len(failed)} that failed; the first, "
            f"{label(failed[0].plan)}: {failed[0].failure}"
        )
    fastest = usable[0]
    rivals = [c for c in usable if (c.measured is None) == (fastest.measured is None)]
    margin = error
    if fastest.measured is not None:
        # Measured against measured, only the noise of the measurements is in doubt.
        margin = max(step_spread(c.measured) for c in rivals if c.measured)
    close = [c for c in rivals if c.sample_s <= fastest.sample_s * (1.0 + margin)]
    best = min(close, key=lambda c: (num_changes(c.plan), c.sample_s))
    order = [best, *(c for c in usable if c is not best), *failed]
    workload = request.workloads[best.plan.workers]
    plan = msgspec.structs.replace(
        best.plan, choices=make_choices(best, order, request.fixed, margin)
    )
    explained = [msgspec.structs.replace(c, why=_why(c, best, fastest, margin)) for c in order]
    explained[0] = msgspec.structs.replace(
        explained[0], plan=plan, timeline=simulate(request.machine, workload, best.plan)
    )
    assumed = [note for c in order for note in c.timeline.notes]
    return Ranking(
        candidates=tuple(explained),
        error=error,
        notes=tuple(dict.fromkeys((*notes, *assumed))),
    )


def _why(candidate: Candidate, best: Candidate, fastest: Candidate, margin: float) -> str:
    if candidate.failure:
        return f"failed when tried: {candidate.failure}"
    how = "measured" if candidate.measured else "predicted"
    if candidate is best:
        if best is fastest:
            return f"the fastest {how}: {units.seconds(best.step_s)} a step"
        gain = 1.0 - fastest.sample_s / best.sample_s
        return (
            f"{how} {units.seconds(best.step_s)} a step; {label(fastest.plan)} would be "
            f"{units.percent(gain)} faster, which is within the uncertainty of {units.percent(margin)}, so "
            "the simpler plan is kept"
        )
    times = units.digits3(ratio(candidate, best))
    if candidate.measured is None and best.measured is not None:
        return f"not tried; predicted {times} x the time per sample of the chosen plan"
    return f"{how} {times} x the time per sample of the chosen plan"


def _nothing_fits(pruned: Sequence[Pruned], request: Request) -> PlanError:
    if not pruned:
        counts = sorted(request.workloads)
        return PlanError(
            f"wanted a number of workers that fits {request.machine.host.cores} cores, got workloads for "
            f"{counts} workers; trace the step for fewer workers"
        )
    first = pruned[0]
    return PlanError(
        f"wanted a plan that fits in memory, got none: {label(first.plan)} {first.reason}; reduce the "
        "batch size or use more devices"
    )
