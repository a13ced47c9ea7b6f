"""`choose`: enumerate plans, prune by memory, rank by simulation, try the best, and say why."""

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from ridgeline import units
from ridgeline.errors import MachineError, PlanError, RidgelineError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner.knobs import (
    Request,
    enumerate_plans,
    make_request,
    num_changes,
)
from ridgeline.planner.preparation import (
    COMPILED_ERROR,
    compile_budget_s,
    is_compiled,
    with_kin,
)
from ridgeline.planner.pruning import Pruned
from ridgeline.planner.ranking import Candidate, Ranking, label
from ridgeline.planner.reasons import make_choices, why
from ridgeline.planner.trials import (
    ASSUMED_ERROR,
    MOST_TRIAL_SHARE,
    left_untried,
    num_tries,
    pick_trials,
)
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.verdict import step_spread, verify
from ridgeline.workload import Workload

Trial = Callable[[Plan], Timeline]


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
        steps: Steps of the run, if known: then the whole run counts, preparation (compiling) included, and
            trials are limited to a quarter of it. Otherwise preparation is stated but not weighed.
        trial: Runs a plan for some steps and returns the measured timeline; None ranks by prediction.
        tries: Most trials.

    Returns:
        All plans that were simulated: those tried first, by measured time per sample; then the others by
        prediction; failed ones last. With known `steps`, by the time of the whole run. A plan that is
        faster by less than the uncertainty does not displace a simpler one.

    Raises:
        PlanError: a fixed knob, or a number of workers or steps, is unknown or impossible, no plan fits in
            memory, or every trial failed that the user's knobs leave.
        MachineError: the profile lacks what every plan needs.

    Cost: Simulations take milliseconds each; trials run the step for real, and compile it first where a
        quarter of a run of known length pays for that; of unknown length, two minutes of expected compiling
        on a GPU and none on a CPU.
    """
    request = make_request(machine, workload, world_size, fixed or {}, allow, steps)
    plans, pruned = enumerate_plans(request)
    if not plans:
        raise _nothing_fits(pruned, request)
    candidates, notes = _simulated(request, plans, steps)
    notes += [f"left out: {label(p.plan)}: {p.reason}" for p in pruned]
    error = ASSUMED_ERROR
    if trial is not None and candidates:
        budget_s = compile_budget_s(
            candidates, steps, device=request.device, share=MOST_TRIAL_SHARE
        )
        picked = pick_trials(candidates, num_tries(tries, steps), steps=steps, budget_s=budget_s)
        notes += left_untried(candidates, picked, budget_s)
        candidates, error = _tried(candidates, picked, trial)
    return _ranked(request, candidates, error, notes, steps)


def _simulated(
    request: Request, plans: Sequence[Plan], steps: int | None
) -> tuple[list[Candidate], list[str]]:
    """Candidates by predicted cost per sample, and what could not be predicted."""
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
    return sorted(found, key=lambda c: (c.cost_s(steps), num_changes(c.plan))), notes


def _tried(
    candidates: Sequence[Candidate], picked: Collection[int], trial: Trial
) -> tuple[list[Candidate], float]:
    """The candidates with what the trials measured, and the largest miss of their predictions.

    Compilers raise errors of any kind. Such a plan failed where a plainer one of the same single worker is
    tried as well, which raises the user's own errors as they are; several workers would part ways.
    """
    has_plain = any(not is_compiled(candidates[index].plan) for index in picked)
    tried: list[Candidate] = []
    misses: list[float] = []
    for index, candidate in enumerate(candidates):
        if index not in picked:
            tried.append(candidate)
            continue
        try:
            measured = trial(candidate.plan)
            misses.append(abs(verify(candidate.timeline, measured).error))
        except Exception as error:
            is_ours = isinstance(error, RidgelineError)
            plan = candidate.plan
            if not is_ours and not (has_plain and plan.workers == 1 and is_compiled(plan)):
                raise
            failure = str(error) if is_ours else f"{type(error).__name__}: {error}".splitlines()[0]
            tried.append(msgspec.structs.replace(candidate, failure=failure))
        else:
            tried.append(msgspec.structs.replace(candidate, measured=measured))
    return with_kin(tried), max(misses, default=ASSUMED_ERROR)


def _ranked(
    request: Request,
    candidates: Sequence[Candidate],
    error: float,
    notes: Sequence[str],
    steps: int | None,
) -> Ranking:
    usable = sorted(
        (c for c in candidates if not c.failure),
        key=lambda c: (c.measured is None, c.cost_s(steps), num_changes(c.plan)),
    )
    failed = [c for c in candidates if c.failure]
    doubtful: list[Candidate] = []
    if failed and not any(c.measured for c in usable):
        # What compiles rests on the plain step as well: where nothing ran, it is no way out.
        doubtful = [c for c in usable if is_compiled(c.plan)]
        usable = [c for c in usable if not is_compiled(c.plan)]
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
    elif is_compiled(fastest.plan):
        margin = max(margin, COMPILED_ERROR)
    close = [c for c in rivals if c.cost_s(steps) <= fastest.cost_s(steps) * (1.0 + margin)]
    best = min(close, key=lambda c: (num_changes(c.plan), c.cost_s(steps)))
    order = [best, *(c for c in usable if c is not best), *doubtful, *failed]
    workload = request.workloads[best.plan.workers]
    plan = msgspec.structs.replace(
        best.plan, choices=make_choices(best, order, request.fixed, margin, steps)
    )
    explained = [
        msgspec.structs.replace(c, why=why(c, best, fastest, margin, order, steps)) for c in order
    ]
    explained[0] = msgspec.structs.replace(
        explained[0], plan=plan, timeline=simulate(request.machine, workload, best.plan)
    )
    return Ranking(
        candidates=tuple(explained),
        error=error,
        notes=tuple(dict.fromkeys((*notes, *_assumed(best, order)))),
        steps=steps,
    )


def _assumed(best: Candidate, order: Sequence[Candidate]) -> list[str]:
    """What the predictions assumed; of modes that compile in full only for the chosen one."""
    notes = [
        note for c in order if c is best or not is_compiled(c.plan) for note in c.timeline.notes
    ]
    if any(is_compiled(c.plan) and c.measured is None and not c.failure for c in order):
        notes.append(
            "what compiling does is assumed (kernels as fast as their bytes): untried modes that compile are "
            f"taken to be right within {units.percent(COMPILED_ERROR)} only"
        )
    return notes


def _nothing_fits(pruned: Sequence[Pruned], request: Request) -> PlanError:
    if not pruned:
        counts = sorted(request.workloads)
        return PlanError(
            f"wanted a number of workers that fits {request.machine.host.cores} cores, got workloads for "
            f"{counts} workers; trace the step for fewer workers"
        )
    first = pruned[0]
    return PlanError(
        f"wanted a plan that can run, got none: {label(first.plan)} {first.reason}; {first.advice}"
    )
