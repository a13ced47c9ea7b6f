"""`choose`: enumerate plans, prune by memory, rank by simulation, try the best, and say why."""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from ridgeline import units
from ridgeline.errors import MachineError, OutOfTimeError, PlanError
from ridgeline.given import Count, Positive, checked
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner.exchanges.exchanges import uncompared
from ridgeline.planner.exchanges.held import only_timed, uncompared_held
from ridgeline.planner.exchanges.pruning import Pruned
from ridgeline.planner.exchanges.rhythms import rhythm_notes
from ridgeline.planner.knobs import (
    enumerate_model_graphs,
    enumerate_plans,
    make_request,
    num_changes,
)
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import COMPILED_ERROR, compile_budget_s, is_compiled
from ridgeline.planner.ranking import Candidate, Ranking
from ridgeline.planner.reasons import make_choices, why
from ridgeline.planner.request import PlanRequest
from ridgeline.planner.trials.other_exchange import with_other_exchanges
from ridgeline.planner.trials.readings import as_read
from ridgeline.planner.trials.run_off import NUM_TRIALS, run_off
from ridgeline.planner.trials.second_look import looked_at_again
from ridgeline.planner.trials.trial_loop import Allowance, Trial, since_now, tried_in_turn
from ridgeline.planner.trials.trials import MOST_TRIAL_SHARE, has_failed_alike, num_tries
from ridgeline.planner.trials.untimed import ASSUMED_ERROR, with_doubt
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import ALGORITHMS, LEAST_GAIN
from ridgeline.verdict import step_spread, verify
from ridgeline.workload import Workload

LEAST_LEAD = 0.01
"""By what an algorithm must be faster that only the plan that won was tried with: that takes memory of its
own, and its trial lies seconds behind the other. Source: ResNet-50 on two H200s, 0.2 % and noise of 0.1."""
MOST_MARGIN = 0.1
"""However noisy trials are, a plainer plan that is slower by more than this is not kept."""
UNTRIED = (
    "compiled plans were left out of the choice, since the given seconds left no time to try them"
)
TRIES = 12
"""Most trials unless the caller says otherwise: a bound against surprises, seldom reached."""
AGAIN_S = 15.0
"""What is tried again may take so long though compiling took all the time, where no seconds were given."""


@checked(PlanError, but=("workload", "world_size", "steps"))
def choose(
    machine: Machine,
    workload: Workload | Mapping[int, Workload],
    *,
    world_size: int | None = None,
    fixed: Mapping[str, object] | None = None,
    allow: Collection[str] = (),
    steps: int | None = None,
    trial: Trial | None = None,
    retrial: Trial | None = None,
    tries: Count = TRIES,
    seconds: float | None = None,
    clock: Callable[[], float] | None = None,
    compile_factor: Positive = 1.0,
) -> Ranking:
    """The plans for a workload, best first, with the reasons for every knob of the first.

    Args:
        machine: The measured machine.
        workload: What each worker does: one workload, run by `world_size` workers; or one by number of
            workers, of one global batch, from which the number of workers is chosen too.
        world_size: Workers there are (with one workload: workers there will be).
        fixed: Knobs that the user sets: `workers`, `threads`, `execution`, `precision`, `accumulate`,
            `bucket_bytes`, `depth`, and of `Sync` `algorithm`, `compression`, `options`, `every`.
        allow: Changes of the maths that may be chosen: `tf32`, `bf16`, `random` (compiled programs draw
            random numbers of their own), `compression` (gradients are sent with losses), `local-steps`
            (workers train alone between exchanges of their parameters). Nothing inexact is otherwise.
        steps: Steps of the run, if known: then the whole run counts, preparation (compiling) included, and
            trials are limited to a quarter of it. Otherwise preparation is stated but not weighed.
        trial: Runs a plan for some steps and returns the measured timeline; None ranks by prediction.
        retrial: The same once more, for a run-off between plans that are close; None leaves that out.
        tries: Most trials.
        seconds: That the choice may take from its start; None leaves it to the length of the run, or on a GPU
            to what compiling the step takes once.
        clock: Seconds since the choice began, the same for all workers; None counts from this call.
        compile_factor: What compiling takes on this host over what is assumed of it.

    Returns:
        All plans that were simulated: those tried first, by measured time per sample; then the others by
        prediction; failed ones last. With known `steps`, by the time of the whole run. A plan that is
        faster by less than the uncertainty does not displace a simpler one.

    Raises:
        PlanError: a fixed knob, or a number of workers or steps, is unknown or impossible, no plan fits in
            memory, or every trial failed that the user's knobs leave.
        MachineError: the profile lacks what every plan needs.

    Cost: Simulations take milliseconds each; trials run the step for real, and compile it first where a
        quarter of a run of known length pays for that; else on a GPU, and on a CPU with `seconds`.
    """
    request = make_request(machine, workload, world_size, fixed or {}, allow, steps)
    request = request._replace(compile_factor=compile_factor)
    plans, pruned = enumerate_plans(request)
    if not plans:
        raise _nothing_fits(pruned, request)
    candidates, notes = _simulated(request, plans)
    notes += [f"left out: {label(p.plan)}: {p.reason}" for p in pruned]
    error = ASSUMED_ERROR
    last: list[str] = []
    if trial is not None and candidates:
        allowance = _allowance(request, candidates, tries, seconds, clock or since_now())
        candidates, told, last = _tried(request, candidates, allowance, trial, retrial)
        error = _largest_miss(candidates)
        candidates, untimed = only_timed(candidates)
        notes += [*told, *untimed]
    notes += uncompared_held(request.fixed, request.device, request.workloads)
    notes += uncompared(request.fixed, request.device, max(request.workloads), last)
    ranking = _ranked(request, candidates, error, notes, is_late=bool(trial and seconds))
    return with_doubt(request, ranking)


def _tried(
    request: PlanRequest,
    candidates: list[Candidate],
    allowance: Allowance,
    trial: Trial,
    retrial: Trial | None,
) -> tuple[list[Candidate], list[str], list[str]]:
    """The candidates when all was tried, what to note, and the algorithms that were tried last."""
    more = functools.partial(_model_graphs, request)
    candidates, notes, allowance = tried_in_turn(request, candidates, allowance, trial, more)
    # Without a second trial nothing tells plans apart that are as close as these.
    names: list[str] = []
    if retrial is None:
        return candidates, notes, names
    try:
        candidates, names = with_other_exchanges(
            request,
            candidates,
            trial,
            lambda plans: _simulated(request, plans)[0],
            left_s=_time_left(allowance, candidates),
        )
        for again, num_trials in ((looked_at_again, 1), (run_off, NUM_TRIALS)):
            room = allowance.room(candidates, sum(c.measured is not None for c in candidates), 0.0)
            has_tries = room.tries >= num_trials
            candidates, told = again(
                candidates,
                retrial,
                device=allowance.device,
                fixed=request.fixed,
                steps=request.steps,
                left_s=_time_left(allowance, candidates) if has_tries else 0.0,
            )
            notes += told
    except OutOfTimeError:  # what was measured until then stands
        pass
    return candidates, notes, names


def _time_left(allowance: Allowance, candidates: Sequence[Candidate]) -> float:
    """Seconds for what is tried again, which has some though compiling took all the time."""
    least_s = AGAIN_S if allowance.seconds is None else 0.0
    return max(allowance.room(candidates, 0, 0.0).seconds, least_s)


def _allowance(
    request: PlanRequest,
    candidates: Sequence[Candidate],
    tries: int,
    seconds: float | None,
    clock: Callable[[], float],
) -> Allowance:
    """What the trials of a choice may take; see `choose` for the arguments."""
    steps = request.steps
    compile_s = compile_budget_s(candidates, steps, device=request.device, share=MOST_TRIAL_SHARE)
    return Allowance(
        tries=num_tries(tries, steps),
        compile_s=compile_s if seconds is None else max(compile_s, seconds),
        seconds=seconds,
        steps=steps,
        device=request.device,
        clock=clock,
    )


def _simulated(request: PlanRequest, plans: Sequence[Plan]) -> tuple[list[Candidate], list[str]]:
    """Candidates by predicted cost per sample, and what could not be predicted."""
    found: list[Candidate] = []
    notes: list[str] = []
    errors: list[MachineError] = []
    for plan in plans:
        workload = request.workloads[plan.workers]
        try:
            timeline = simulate(
                request.machine,
                workload,
                plan,
                # Details are only for the plan that is chosen: `_ranked` simulates it once more.
                details=False,
                compile_factor=request.compile_factor,
            )
        except MachineError as error:
            errors.append(error)
            notes.append(f"left out: {label(plan)}: {error}")
            continue
        samples = workload.samples * plan.workers
        found.append(Candidate(plan=plan, timeline=timeline, why="", samples=samples))
    if not found:
        # Every plan lacks something of the profile: the first error tells what to measure.
        raise errors[0]
    return sorted(found, key=lambda c: (c.cost_s(request.steps), num_changes(c.plan))), notes


def _model_graphs(request: PlanRequest) -> list[Candidate]:
    """Candidates that replay the model alone, where a GPU cannot replay the whole step."""
    plans = enumerate_model_graphs(request)
    return _simulated(request, plans)[0] if plans else []


def _largest_miss(candidates: Sequence[Candidate]) -> float:
    """By what fraction predictions were off in the trials; never below what is assumed without any.

    One trial that hits its prediction says little of the others.
    """
    misses = [
        abs(verify(c.timeline, c.measured).error) for c in candidates if c.measured is not None
    ]
    return max([ASSUMED_ERROR, *misses])


def _ranked(
    request: PlanRequest,
    candidates: Sequence[Candidate],
    error: float,
    notes: Sequence[str],
    *,
    is_late: bool,
) -> Ranking:
    """The ranking of what was tried or, where `is_late` says that time ran out before, of what is plain."""
    steps = request.steps
    usable = sorted(
        (c for c in candidates if not c.failure),
        key=lambda c: (c.measured is None, c.cost_s(steps), num_changes(c.plan)),
    )
    failed = [c for c in candidates if c.failure]
    doubtful: list[Candidate] = []
    is_late = is_late and any(not is_compiled(c.plan) for c in usable)
    if (failed or is_late) and not any(c.measured for c in usable):
        # What compiles rests on the plain step as well: where nothing ran, it is no way out. And where there
        # was no time for a trial, there is none to compile in.
        doubtful = [c for c in usable if is_compiled(c.plan)]
        if is_late and doubtful:
            notes = [*notes, UNTRIED]
        usable = [
            c for c in usable if not is_compiled(c.plan) and not has_failed_alike(c, candidates)
        ]
    if not usable:
        raise PlanError(
            f"wanted a plan that runs, got {len(failed)} that failed; the first, "
            f"{label(failed[0].plan)}: {failed[0].failure}"
        )
    # Times that were measured are not compared with predicted ones: those err by more than plans differ.
    rivals = _mild(
        [c for c in usable if (c.measured is None) == (usable[0].measured is None)], steps
    )
    fastest = rivals[0]
    margins = {id(c): _margin(c, fastest, error) for c in rivals}
    close = [c for c in rivals if c.cost_s(steps) <= fastest.cost_s(steps) * (1.0 + margins[id(c)])]
    best = min(close, key=lambda c: (num_changes(c.plan), c.cost_s(steps)))
    margin = margins[id(best)]
    order = [best, *(c for c in usable if c is not best), *doubtful, *failed]
    fastest = usable[0] if best is fastest else fastest
    workload = request.workloads[best.plan.workers]
    plan = msgspec.structs.replace(
        best.plan, choices=make_choices(best, order, request.fixed, margin, steps)
    )
    explained = [
        msgspec.structs.replace(c, why=why(c, best, fastest, margin, order, steps)) for c in order
    ]
    detailed = simulate(request.machine, workload, best.plan, compile_factor=request.compile_factor)
    explained[0] = msgspec.structs.replace(
        explained[0], plan=plan, timeline=as_read(detailed, best.reading)
    )
    return Ranking(
        candidates=tuple(explained),
        error=error,
        notes=tuple(dict.fromkeys((*rhythm_notes(best), *notes, *_assumed(best, order)))),
        steps=steps,
    )


def _margin(rival: Candidate, fastest: Candidate, error: float) -> float:
    """By what fraction a rival may be slower than the fastest and still be as fast, for all that is known.

    Measured against measured, only the noise of both medians is in doubt, and what is certain to be plainer
    is not worth more than `MOST_MARGIN`.

    Source: the standard error of a median is 1.25 standard deviations over the root of the number of samples,
        and quartiles of a normal distribution lie 0.67 of those apart from it.
    """
    if rival.measured is None or fastest.measured is None:
        return max(error, COMPILED_ERROR) if is_compiled(fastest.plan) else error
    errors = [
        step_spread(measured) / 1.35 * 1.25 / math.sqrt(max(1, len(measured.steps_ns)))
        for measured in (rival.measured, fastest.measured)
    ]
    algorithms = {plan.sync.algorithm for plan in (rival.plan, fastest.plan)}
    is_close = len(algorithms) > 1 and ALGORITHMS[fastest.plan.sync.algorithm].is_tried_last
    least = LEAST_LEAD if is_close else 0.0
    return min(MOST_MARGIN, max(least, 2.0 * math.hypot(*errors)))


def _mild(rivals: Sequence[Candidate], steps: int | None) -> list[Candidate]:
    """Those with no longer intervals than it takes, the fastest first; longer ones lead by `LEAST_GAIN`."""
    enough_s = rivals[0].cost_s(steps) / (1.0 - LEAST_GAIN)
    longest = min(c.plan.sync.every for c in rivals if c.cost_s(steps) <= enough_s)
    return [c for c in rivals if c.plan.sync.every <= longest]


def _assumed(best: Candidate, order: Sequence[Candidate]) -> list[str]:
    """What the predictions assumed; of modes that compile in full only for the chosen one."""
    notes = [
        note for c in order if c is best or not is_compiled(c.plan) for note in c.timeline.notes
    ]
    if any(
        is_compiled(c.plan) and c.measured is None and not c.failure and c.reading is None
        for c in order
    ):
        notes.append(
            "what compiling does is assumed (kernels as fast as their bytes): untried modes that compile are "
            f"assumed to be right within {units.percent(COMPILED_ERROR)} only"
        )
    return notes


def _nothing_fits(pruned: Sequence[Pruned], request: PlanRequest) -> PlanError:
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
