"""From a task to a plan: measure, trace, choose, with trials of the best candidates.

Started by hand, measuring and trying happen in process groups of their own, so that every number of
workers can be compared. Under torchrun the group is there already and its size is given: all workers
measure and try in place, and take what rank 0 finds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ridgeline import units
from ridgeline.cli.inputs import worker_counts
from ridgeline.cli.worker import Job, TrialRequest
from ridgeline.codec import Value
from ridgeline.errors import PlanError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.expectation import expected
from ridgeline.planner.staleness import choose_by_profile, remembered
from ridgeline.simulator.compile_time import compile_seconds
from ridgeline.simulator.model import setting_of
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.verdict import step_drift
from ridgeline.workload import Workload

if TYPE_CHECKING:
    from ridgeline.runtime.task import Task
    from ridgeline.runtime.world import World

Say = Callable[[str], None]
TRIES = 3
"""Candidates tried for real; with them a wrong prediction costs a trial, not a training run."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user fixed; None is left to the search.

    Attributes:
        plan: A whole plan: nothing is searched.
        workers: Number of workers.
        threads: Torch threads per worker.
        machine_file: A saved profile instead of measuring.
        tries: Candidates tried for real; 0 trusts the simulator.
    """

    plan: Plan | None = None
    workers: int | None = None
    threads: int | None = None
    machine_file: Path | None = None
    tries: int = TRIES


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
    from ridgeline.probe.measure import measure
    from ridgeline.tasks.step import step_workload

    wishes = settled(wishes)
    given = _given_machine(wishes)
    known = given or measure(settings=())
    device = known.device_kind
    workloads: dict[int, Workload] = {}
    counts = worker_counts(known, task.batch_size, wished=wishes.workers, threads=wishes.threads)
    for count in counts if wishes.workers is None else (wishes.workers,):
        say(f"tracing the step of {task.name} with {count} worker{'s' * (count > 1)}")
        workloads[count] = step_workload(
            task, workers=count, device=device, precisions=_precisions(wishes), may_run=True
        )

    def profile(refresh: bool) -> Machine:
        machine = known
        for count, workload in workloads.items():
            shape = wishes.plan or Plan(workers=count, threads=wishes.threads or 0)
            setting = setting_of(machine, workload, shape)
            machine = measure(workload=workload, settings=(setting,), refresh=refresh, progress=say)
            refresh = False  # what was measured for the first is kept for the others
        return machine

    def attempt(plan: Plan) -> Timeline:
        from ridgeline.probe.group import run_in_group

        say(f"trying {plan!r}{_warning(plan, workloads[plan.workers])}")
        request = TrialRequest(job=job, plan=plan.settings, device=device, seed=seed)
        reply = run_in_group(
            "ridgeline.cli.worker:trial",
            msgspec.json.encode(request),
            workers=plan.workers,
            threads=plan.threads,
            device=device,
        )
        measured = msgspec.json.decode(reply, type=Timeline)
        say(f"  took {trial_words(measured)}")
        return measured

    decision = _choose(given, profile, workloads, wishes, steps=steps, attempt=attempt, say=say)
    _announce(decision, say)
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
    from ridgeline.probe.measure import measure
    from ridgeline.runtime.agree import share_bytes, share_text
    from ridgeline.runtime.plan_trial import try_plan
    from ridgeline.tasks.step import step_workload

    wishes = settled(wishes)
    if wishes.workers not in (None, world.size):
        raise PlanError(
            f"wanted --workers {wishes.workers}, got {world.size} processes from torchrun; leave --workers "
            f"out, or start torchrun with {wishes.workers}"
        )
    quiet: Say = say if world.rank == 0 else lambda line: None
    quiet(f"tracing the step of {task.name} with {world.size} worker{'s' * (world.size > 1)}")
    mine = step_workload(
        task,
        workers=world.size,
        device=world.device.type,
        precisions=_precisions(wishes),
        may_run=True,
    )
    traced = share_bytes(msgspec.json.encode(mine), world)
    workload = msgspec.json.decode(traced, type=Workload)

    def profile(refresh: bool) -> Machine:
        return measure(
            workload=workload, settings=(world.setting,), refresh=refresh, progress=quiet
        )

    def attempt(plan: Plan) -> Timeline:
        quiet(f"trying {plan!r}{_warning(plan, workload)}")
        measured = try_plan(task, plan, world, seed=seed)
        shared = share_bytes(msgspec.json.encode(measured), world)
        agreed = msgspec.json.decode(shared, type=Timeline)
        quiet(f"  took {trial_words(agreed)}")
        return agreed

    here_only = replace(wishes, workers=world.size, threads=world.threads)
    decision = _choose(
        _given_machine(wishes),
        profile,
        {world.size: workload},
        here_only,
        steps=steps,
        attempt=attempt,
        say=quiet,
        agree=lambda why: share_text(why, world),
    )
    _announce(decision, quiet)
    return decision


def trial_words(measured: Timeline) -> str:
    """What a trial took: a step, how the machine drifted meanwhile, and once the preparation.

    No step contains the preparation.
    """
    words = f"{units.nanoseconds(measured.step_ns)} a step"
    drift = step_drift(measured)
    if drift is not None:
        words += f", drift {100 * drift:+.1f} %"
    prepared_s = measured.counters.get("compile_s", 0.0)
    return f"{words}, after {units.seconds(prepared_s)} of preparing it" if prepared_s else words


def settled(wishes: Wishes) -> Wishes:
    """The wishes with the numbers of a given plan filled in.

    Raises:
        PlanError: plan and numbers contradict each other.
    """
    if wishes.plan is None:
        return wishes
    for name, wanted, planned in (
        ("workers", wishes.workers, wishes.plan.workers),
        ("threads", wishes.threads, wishes.plan.threads),
    ):
        if wanted is not None and wanted != planned:
            raise PlanError(
                f"wanted --{name} {wanted}, got {name}={planned} in the plan; give one of them"
            )
    return replace(wishes, workers=wishes.plan.workers, threads=wishes.plan.threads or None)


def _given_machine(wishes: Wishes) -> Machine | None:
    return None if wishes.machine_file is None else Machine.load(wishes.machine_file)


def _announce(decision: Decision, say: Say) -> None:
    """Says how long the first step of the run will take to compile, if it does."""
    seconds = compile_seconds(decision.workload, decision.plan.execution)
    if seconds:
        say(
            f"{decision.plan.execution} compiles before the first step: about {units.seconds(seconds)}, less "
            "where torch has it in its cache"
        )


def _precisions(wishes: Wishes) -> tuple[str, ...]:
    """Precisions that the step may run in besides the model's own."""
    return () if wishes.plan is None else (wishes.plan.precision,)


def _warning(plan: Plan, workload: Workload) -> str:
    """Says that a plan compiles first, so that nobody takes the silence for a hang."""
    seconds = compile_seconds(workload, plan.execution)
    return f" (compiles first, about {units.seconds(seconds)})" if seconds else ""


def _choose(
    given: Machine | None,
    profile: Callable[[bool], Machine],
    workloads: Mapping[int, Workload],
    wishes: Wishes,
    *,
    steps: int,
    attempt: Callable[[Plan], Timeline],
    say: Say,
    agree: Callable[[str], str] = str,
) -> Decision:
    """The user's plan, or the best.

    Args:
        given: The profile that the user gave.
        profile: See `choose_by_profile`.
        workloads: By number of workers.
        wishes: See `Wishes`.
        steps: Steps of the whole training.
        attempt: Runs a trial.
        say: Takes lines of progress.
        agree: Takes rank 0's word, where there are several workers.
    """
    if wishes.plan is not None:
        machine, workload = given or profile(False), workloads[wishes.plan.workers]
        predicted = simulate(machine, workload, wishes.plan)
        return Decision(
            machine=machine,
            workload=workload,
            plan=wishes.plan,
            predicted=predicted,
            expected=predicted,
        )
    fixed: dict[str, object] = {}
    if wishes.workers is not None:
        fixed["workers"] = wishes.workers
    if wishes.threads is not None:
        fixed["threads"] = wishes.threads
    trial = remembered(attempt) if wishes.tries else None

    def rank(machine: Machine) -> Ranking:
        return choose(machine, workloads, fixed=fixed, steps=steps, trial=trial, tries=wishes.tries)

    if given is None:
        machine, ranking = choose_by_profile(profile, rank, agree=agree, say=say)
    else:  # measuring here would tell nothing about it
        machine, ranking = given, rank(given)
    best = ranking.best
    return Decision(
        machine=machine,
        workload=workloads[best.plan.workers],
        ranking=ranking,
        plan=best.plan,
        predicted=best.timeline,
        expected=expected(best.timeline, best.measured),
    )
