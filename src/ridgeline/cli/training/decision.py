"""From a task to a plan: measure, trace, choose, with trials of the best candidates.

Started by hand, measuring and trying happen in process groups of their own, so that every number of
workers can be compared. Under torchrun the group is there already and its size is given: all workers
measure and try in place, and take what rank 0 finds.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ridgeline import units
from ridgeline.cli.arguments.inputs import measured, traced, worker_counts
from ridgeline.cli.arguments.wishes import Wishes, settled
from ridgeline.cli.training.apart import try_apart
from ridgeline.cli.training.profiles import (
    TaskProfiles,
    held_against_task,
    mark,
    unmarked,
    why_again,
)
from ridgeline.cli.training.worker import Job, TrialRequest, phases_in_group
from ridgeline.codec import Value
from ridgeline.decision.heartbeat import Heartbeat, Say
from ridgeline.decision.memory import compile_times, remembered
from ridgeline.decision.memory.recalling import tried_again
from ridgeline.decision.memory.remembered import Remembered
from ridgeline.decision.retaking import doubting
from ridgeline.decision.told_trials import ToldTrials
from ridgeline.errors import MachineError, PlanError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.doubted import said
from ridgeline.planner.trials import staleness
from ridgeline.planner.trials.expectation import as_told, expected
from ridgeline.planner.trials.readings import as_read
from ridgeline.planner.trials.trial_loop import Trial
from ridgeline.simulator.compiler.compile_time import compile_seconds
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.workload import Workload

if TYPE_CHECKING:
    from ridgeline.runtime.training.task import Task
    from ridgeline.workers.world import World


class Decision(Value, frozen=True, kw_only=True):
    """How a task will be trained, and why; a given plan has no ranking.

    `predicted` is what the simulator said before any trial, `expected` what is known when training begins:
    the same as the plan's trial corrected it, where there was one.
    """

    machine: Machine
    workload: Workload
    plan: Plan
    predicted: Timeline
    expected: Timeline
    ranking: Ranking | None = None


def decide(task: "Task", job: Job, wishes: Wishes, *, seed: int, steps: int, say: Say) -> Decision:
    """Choose a plan on this host, for any number of workers that the wishes leave open.

    Args:
        task: The loaded task.
        job: How processes of trials load it again.
        wishes: See `Wishes`.
        seed: Of the trials.
        steps: Steps of the whole training, over which preparations pay off.
        say: Takes lines of progress.

    Raises:
        PlanError: the wishes contradict each other, the task or this machine.
        MachineError: the machine refuses, or its profile lacks what the choice needs.
        LaunchError: a measuring or trying process failed.
    """
    from ridgeline.probe.measure import known_machine

    wishes = settled(wishes)
    here, given = known_machine(), wishes.machine
    known = given or here.machine
    device = known.device_kind
    counts = worker_counts(known, task.batch_size, wished=wishes.workers, threads=wishes.threads)
    if wishes.workers is not None:
        counts = (wishes.workers,)  # it was counted with the others to be checked
    factor = compile_times.load(here.directory).factor(task.name)

    def requested(plan: Plan) -> TrialRequest:
        return TrialRequest(job=job, plan=plan.settings, device=device, seed=seed)

    def attempt(plan: Plan) -> Timeline:
        return try_apart(requested(plan))

    with Heartbeat(say) as heartbeat:
        workloads = traced(task, counts, device, heartbeat, *wishes.forms)
        key = choice_key(here.machine, workloads, wishes, steps)
        is_open = given is None and wishes.plan is None and wishes.tries > 0
        again = "" if given is not None else why_again(known, heartbeat)
        profiles = TaskProfiles(
            known=known,
            workloads=workloads,
            wishes=wishes,
            requested=requested,
            heartbeat=heartbeat,
        )
        # What was chosen by a profile that is to be measured again is chosen again, too.
        kept = remembered.recall(here.directory, key) if is_open and not again else None
        recalled = None
        if kept is not None:
            recalled = _recalled(kept, profiles, attempt, heartbeat, factor)
        decision = recalled or _choose(
            given,
            profiles.retaken if again else profiles.of_all,
            workloads,
            wishes,
            steps=steps,
            attempt=attempt,
            heartbeat=heartbeat,
            compile_factor=factor,
            again=again,
        )
    profile = decision.machine.measured_at
    is_kept = recalled is not None and kept is not None and kept.profile == profile
    if is_open and not is_kept and decision.ranking and decision.ranking.best.measured is not None:
        problem = remembered.keep(here.directory, key, decision.ranking, profile=profile)
        if problem:
            say(problem)
    if decision.ranking is not None and recalled is None:  # else a cache had what was compiled
        compile_times.learn(here.directory, decision.ranking, factor, step=task.name)
    return decision


def decide_in_group(
    task: "Task", world: "World", wishes: Wishes, *, seed: int, steps: int, say: Say
) -> Decision:
    """Choose a plan for the process group that this worker is in; the same on all workers.

    Args:
        task: The loaded task.
        world: This worker's place.
        wishes: `workers` and `threads` must be those of the group, if given.
        seed: Of the trials.
        steps: Steps of the whole training.
        say: Takes lines of progress, on rank 0.

    Raises:
        PlanError: the wishes contradict each other, the task or the group.
        MachineError: the profile lacks what the choice needs.
    """
    from ridgeline.decision.trial import LONGEST_S, limited
    from ridgeline.probe.measure import known_machine
    from ridgeline.runtime.training.plan_trial import try_plan
    from ridgeline.workers.agree import share_bytes, share_text

    wishes = settled(wishes)
    if wishes.workers not in (None, world.size):
        raise PlanError(
            f"wanted --workers {wishes.workers}, got {world.size} processes from torchrun; leave --workers "
            f"out, or start torchrun with {wishes.workers}"
        )
    known = known_machine()
    directory = known.directory
    # By `repr`, which keeps all digits: workers that rank by other numbers may choose otherwise.
    factor = float(share_text(repr(compile_times.load(directory).factor(task.name)), world))

    def profile(refresh: bool) -> Machine:
        machine = measured(
            workload, world.setting, heartbeat, codecs=wishes.may_encode, refresh=refresh
        )
        if refresh and again and world.rank == 0:
            machine = mark(machine, "", known.machine.retakes + 1)
        phases = partial(phases_in_group, task, world, seed=seed)
        return held_against_task(machine, workload, world.setting, phases, heartbeat)

    def attempt(plan: Plan) -> Timeline:
        with limited(plan, world):
            mine = try_plan(task, plan, world, seed=seed, compile_limit_s=LONGEST_S)
        # Every worker measures another time, and all must rank by the same.
        return msgspec.json.decode(share_bytes(msgspec.json.encode(mine), world), type=Timeline)

    with Heartbeat(say if world.rank == 0 else None) as heartbeat:
        mine = traced(task, (world.size,), world.device.type, heartbeat, *wishes.forms)[world.size]
        shared = share_bytes(msgspec.json.encode(mine), world)
        workload = msgspec.json.decode(shared, type=Workload)
        mine_again = "" if wishes.machine is not None else why_again(known.machine, heartbeat)
        again = share_text(mine_again, world)
        decision = _choose(
            wishes.machine,
            profile,
            {world.size: workload},
            replace(wishes, workers=world.size, threads=world.threads),
            steps=steps,
            attempt=attempt,
            heartbeat=heartbeat,
            compile_factor=factor,
            agree=lambda why: share_text(why, world),
            again=again,
            is_first=world.rank == 0,
        )
    if world.rank == 0 and decision.ranking is not None:
        compile_times.learn(directory, decision.ranking, factor, step=task.name)
    return decision


def choice_key(
    machine: Machine, workloads: Mapping[int, Workload], wishes: Wishes, steps: int
) -> str:
    """What a choice for this run depends on, see `remembered`; runs of about as many steps share it."""
    traces = [msgspec.json.encode(workload) for workload in workloads.values()]
    wanted = [wishes.knobs, wishes.tries, sorted(wishes.allow), steps.bit_length()]
    parts = ["train", machine.fingerprint, *wanted, *traces]
    return remembered.key_of(parts)


def _choose(
    given: Machine | None,
    profile: Callable[[bool], Machine],
    workloads: Mapping[int, Workload],
    wishes: Wishes,
    *,
    steps: int,
    attempt: Trial,
    heartbeat: Heartbeat,
    compile_factor: float,
    agree: Callable[[str], str] = str,
    again: str = "",
    is_first: bool = True,
) -> Decision:
    """The user's plan, or the best; `profile` and `again` are those of `staleness.choose_by_profile`."""

    def compiling_s(plan: Plan) -> float:
        return compile_factor * compile_seconds(workloads[plan.workers], plan.execution)

    # Nothing here measures a given profile again, so it is doubted now or never.
    for line in () if given is None else said(given):
        heartbeat.tell(f"{wishes.machine_file}: {line}")
    told = ToldTrials(attempt, compiling_s, heartbeat)
    trial = staleness.remembered(told) if wishes.tries else None

    def rank(machine: Machine) -> Ranking:
        return choose(
            machine,
            workloads,
            fixed=wishes.knobs,
            allow=wishes.allow,
            steps=steps,
            trial=trial,
            tries=wishes.tries,
            compile_factor=compile_factor,
        )

    if wishes.plan is not None:
        machine = given or profile(bool(again))
        decision = _as_given(machine, workloads, wishes.plan, compile_factor)
    elif given is None:
        chosen = staleness.choose_by_profile(
            profile,
            rank,
            agree=agree,
            say=heartbeat.tell,
            again=again,
            doubt=doubting(mark if is_first else unmarked, heartbeat.tell),
        )
        decision = _as_ranked(*chosen, workloads)
    else:  # measuring here would say nothing about it
        decision = _as_ranked(given, rank(given), workloads)
    seconds = compiling_s(decision.plan)
    if seconds:
        heartbeat.tell(
            f"{decision.plan.execution} compiles before the first step: about {units.seconds(seconds)}, less "
            "where torch has it in its cache"
        )
    return decision


def _as_given(
    machine: Machine, workloads: Mapping[int, Workload], plan: Plan, compile_factor: float
) -> Decision:
    workload = workloads[plan.workers]
    predicted = simulate(machine, workload, plan, compile_factor=compile_factor)
    return Decision(
        machine=machine, workload=workload, plan=plan, predicted=predicted, expected=predicted
    )


def _recalled(
    kept: Remembered,
    profiles: TaskProfiles,
    attempt: Trial,
    heartbeat: Heartbeat,
    compile_factor: float,
) -> Decision | None:
    """The choice of an earlier start, predicted with all details and tried; None where it fails.

    It is predicted as it was then. From a profile that was measured again since it is predicted again, once
    the operators of the step, which that lacks, are timed.
    """
    best = kept.ranking.best
    is_same = kept.profile == profiles.known.measured_at
    try:
        machine = profiles.known if is_same else profiles.of(best.plan.workers)
        given = _as_given(machine, profiles.workloads, best.plan, compile_factor)
    except MachineError:  # what was measured then is no longer there
        return None
    again = tried_again(kept.ranking, attempt, heartbeat, heartbeat.tell)
    if again is None:
        return None
    predicted = as_read(given.predicted, best.reading)
    if is_same:
        predicted = as_told(predicted, best.timeline)
    best = msgspec.structs.replace(again.best, timeline=predicted)
    return msgspec.structs.replace(
        given,
        predicted=predicted,
        ranking=msgspec.structs.replace(again, candidates=(best, *again.candidates[1:])),
        expected=expected(predicted, best.measured),
    )


def _as_ranked(machine: Machine, ranking: Ranking, workloads: Mapping[int, Workload]) -> Decision:
    best = ranking.best
    return Decision(
        machine=machine,
        workload=workloads[best.plan.workers],
        ranking=ranking,
        plan=best.plan,
        predicted=best.timeline,
        expected=expected(best.timeline, best.measured),
    )
