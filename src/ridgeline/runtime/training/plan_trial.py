"""`try_plan`: how long a step of a plan takes on this machine, measured as in a run.

The trial goes through the same feed, the same readings and the same black box as a run. It lasts long enough
for the median to be that of the steady state: a step of half a millisecond needs more than a few of them.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.execution import MODES
from ridgeline.feeding import Handover, feed
from ridgeline.packages.loaded_programs import ProgramWatch
from ridgeline.plan import Plan, Sync
from ridgeline.planner.exchanges.periods import (
    PeriodParts,
    Sampling,
    exchange_steps,
    over_parts,
    over_periods,
    sampling,
)
from ridgeline.planner.trials.trial_steps import FEWEST_STEPS, LONGEST_PERIODS_S, LONGEST_S
from ridgeline.programs.compiling import CompiledForms
from ridgeline.recording.recorder import WINDOW
from ridgeline.runtime.steps.step import WARMUP_STEPS, PlannedStep, move
from ridgeline.runtime.training import schedule
from ridgeline.runtime.training.fetching import batches
from ridgeline.runtime.training.readings import LossReader
from ridgeline.runtime.training.round import Round
from ridgeline.runtime.training.sampler import Sampler
from ridgeline.runtime.training.task import Task
from ridgeline.state import random_state
from ridgeline.timeline import Timeline
from ridgeline.workers.agree import gather_bytes, share_text
from ridgeline.workers.blackbox import BlackBox
from ridgeline.workers.world import World

TRIAL_STEPS = 15
"""Least measured steps: enough for a median with quartiles, few enough to try several plans. Of those that
take seconds fewer are measured, see `LONGEST_S`."""
TRIAL_S = 0.5
"""Short steps are measured for so long, as far as the recorder keeps them."""


def try_plan(
    task: Task, plan: Plan, world: World, *, seed: int, compile_limit_s: float = math.inf
) -> Timeline:
    """Train a fresh model for some steps under a plan; all workers of the world call this.

    A step lasts as long as it does on the slowest worker.

    Raises:
        RidgelineError: the plan does not run.
    """
    # All trials begin with the same weights and batches, so that only plans differ.
    random_state.seed_all(seed)
    watch = ProgramWatch()
    model = move(task.model(), world.device)
    optimizer = task.optimizer(model)
    data = batches_of(task, world, seed=seed)
    handover = Handover()
    with (
        tempfile.TemporaryDirectory() as place,
        # Closed behind the step, which notes frames until it ends, also where the plan fails.
        contextlib.closing(BlackBox(Path(place) / "trial.bin")) as box,
        PlannedStep(
            model,
            task.loss_fn,
            optimizer,
            plan,
            clip_norm=task.clip_norm,
            device=world.device.type,
            process_group=world.process_group,
            name=task.name,
            forms=CompiledForms(compile_limit_s),
            is_undone=True,
        ) as step,
    ):
        reader = LossReader(world)
        # A trial pays for stepping the schedule as a run does.
        scheduler = schedule.make(task, optimizer, WARMUP_STEPS + WINDOW)
        around = Round(step, reader, box, scheduler)

        def run(first: int, steps: int) -> None:
            source = data.some(first, steps)
            with feed(source, world.device, depth=plan.feed.depth, handover=handover) as fed:
                for number, batch in enumerate(fed, first):
                    around(batch, number)
                    if reader.is_full:
                        reader.take(wants_stop=False)

        measured = _sampled(step, run)
    if MODES[plan.execution].is_compiled:
        measured = watch.noted(measured)
    everyone = gather_bytes(msgspec.json.encode(measured.steps_ns), world)
    by_worker = [msgspec.json.decode(data, type=tuple[int, ...]) for data in everyone]
    # Step by step: a worker may be the slowest in one step and not in the next.
    slowest = tuple(max(steps) for steps in zip(*by_worker, strict=True))
    return msgspec.structs.replace(measured, steps_ns=slowest)


def _sampled(step: PlannedStep, run: Callable[[int, int], None]) -> Timeline:
    """The timeline of enough steps to know the mean of a step.

    Args:
        step: Of the plan that is tried; nothing ran yet.
        run: Takes steps: the number of the first one, from 1, and how many.
    """
    sync, world = step.plan.sync, step.world
    is_held = exchange_steps(sync) > 0
    if is_held:
        step.hold_exchanges()
    # Enough to know how long a step takes, by which the rest is decided.
    first = WARMUP_STEPS + FEWEST_STEPS
    run(1, first)
    wanted, alone = _sampling(sync, step.timeline().step_ns, world)
    if alone:
        more = alone - FEWEST_STEPS
        if more:
            run(first + 1, more)
        share = step.release_exchange()
        run(first + more + 1, wanted - alone)
        return over_parts(step.timeline(), sync, PeriodParts(alone, share))
    if is_held:
        step.release_exchange()
    run(first + 1, wanted - (0 if is_held else FEWEST_STEPS))
    measured = step.timeline()
    if is_held:  # those that were taken first are no part of a period
        recorded = measured.steps_ns[-wanted:]
        measured = msgspec.structs.replace(measured, steps_ns=recorded)
    return over_periods(measured, sync)


def _sampling(sync: Sync, step_ns: int, world: World) -> Sampling:
    """What to measure when a step takes this long; decided by worker 0, so that all take as many steps."""
    step_s = max(1, int(share_text(str(step_ns), world))) * 1e-9
    least = max(TRIAL_STEPS, min(math.ceil(TRIAL_S / step_s), WINDOW))
    if least * step_s > LONGEST_S:
        least = max(FEWEST_STEPS, math.floor(LONGEST_S / step_s))
    return sampling(sync, least, step_s, LONGEST_PERIODS_S)


def batches_of(task: Task, world: World, *, seed: int) -> "Batches":
    """This worker's share of a task's batches, in the order of a run with this seed."""
    return Batches(Sampler(task.train_data, task.batch_size, world, seed=seed), task.batch_size)


class Batches:
    """Whole batches of the first epoch, as often as it takes."""

    def __init__(self, sampler: Sampler, batch_size: int) -> None:
        self._sampler = sampler
        self._order = sampler.order(0)
        # Whole ones: a shorter batch would pass for a fast step, and have a graph of its own captured.
        self._whole = max(1, sampler.num_samples // batch_size)

    def some(self, first: int, count: int) -> Iterator[Any]:
        """This many batches; the first is that of step `first`, counted from 1."""
        steps = range(first - 1, first - 1 + count)
        slices = (self._sampler.slice_of(self._order, step % self._whole) for step in steps)
        return batches(self._sampler.dataset, slices)
