"""A trial: a plan run for some steps on an example batch and undone, so that it leaves no trace."""

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ridgeline import units
from ridgeline.capture.casts import outside_cached_weights
from ridgeline.capture.deadline import deadline
from ridgeline.capture.dropout_states import left_as_found
from ridgeline.errors import OutOfTimeError, RidgelineError
from ridgeline.execution import MODES
from ridgeline.host.speed import HOST_SPEED, MOST_WAIT_S
from ridgeline.packages.loaded_programs import ProgramWatch
from ridgeline.packages.program_trial import programs_tried_first
from ridgeline.plan import Plan
from ridgeline.planner.exchanges.periods import (
    PeriodParts,
    exchange_steps,
    over_parts,
    over_periods,
)
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.trials.trial_steps import (
    FEWEST_STEPS,
    MOST_WARM_STEPS,
    SETTLED,
    WARM_S,
    first_steps,
    measured_steps,
)
from ridgeline.reach.side_effects import refusing_writes
from ridgeline.reach.undo import undone
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tensors.batch import rebuilt
from ridgeline.timeline import Timeline
from ridgeline.workers.agree import gather_bytes, share_text
from ridgeline.workers.world import World

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ridgeline.runtime.steps.body.body import LossFunction

STOPPING_S = 0.5
STOPPING_SHARE = 0.1
"""To stop a trial and undo its steps, in seconds, and as a share of what is left at most.

Source: Llama of 110 million parameters on an H100, 0.45 s.
"""
LOOKED_AFTER_S = 0.05
"""From this on the time that is left is looked at before every step, and not only before the first."""
LONGEST_S = 600.0
"""A trial that compiles is stopped after this where no seconds were given: something is wrong then."""


class Script(NamedTuple):
    """What a script trains."""

    model: "nn.Module"
    loss_fn: "LossFunction"
    optimizer: "Optimizer"


def run_trial(
    make: Callable[[Plan], PlannedStep],
    plan: Plan,
    script: Script,
    examples: Sequence[Any],
    world: World,
    left: Callable[[], float] = lambda: math.inf,
    watch: ProgramWatch | None = None,
    hopeless_s: float = math.inf,
) -> Timeline:
    """The measured timeline of a plan; model, optimizer and random state are put back.

    A step lasts as long as it does on the slowest worker. All workers call this, and all get rank 0's
    timeline. It ends when time is up, with what it has measured by then. A worker alone is stopped whatever
    it does, several between two of their steps, since the others would wait for the one that stops.

    The plan is tried on the examples in turn; other networks that the loss reads are put back, too. `left`
    gives the seconds that are left for it, the same on all workers, infinite where none were given. `watch`
    was made before anything of the plan was compiled; what it reads comes with the timeline. A step of
    seconds that takes longer than `hopeless_s`, the same on all workers, is measured once.

    Raises:
        OutOfTimeError: no step was measured in that time.
        SideEffectError: the step of a worker alone writes outside of the process; it was kept from it.
        CaptureError: what compiles did not end in `LONGEST_S`, where no seconds were given.

    Cost: The steps, and copies of parameters, buffers and optimizer state; for reading programs up to half a
        second for each of some hundred kernels.
    """
    alone = refusing_writes() if world.size == 1 else contextlib.nullcontext()
    parts: PeriodParts | None = None
    with taken_back(make, plan, script, examples) as step:
        try:
            with limited(plan, world, left()), alone:
                parts = _run(step, examples, world, left, hopeless_s)
        except OutOfTimeError:
            if not step.recorder.num_steps:
                raise
        measured = step.timeline()
        if parts is None:
            measured = over_periods(measured, plan.sync)
        else:
            measured = over_parts(measured, plan.sync, parts)
    if watch is not None and world.rank == 0 and MODES[plan.execution].is_compiled:
        measured = watch.noted(measured)
    return _of_the_slowest(measured, world)


@contextlib.contextmanager
def taken_back(
    make: Callable[[Plan], PlannedStep],
    plan: Plan,
    script: Script,
    examples: Sequence[Any],
) -> Iterator[PlannedStep]:
    """The step of a plan; it is closed afterwards, and what it has changed is put back. See `run_trial`."""
    with (
        outside_cached_weights(),
        left_as_found(script.model, script.loss_fn),
        undone(*script, list(examples)),
        contextlib.closing(make(plan)) as step,
    ):
        yield step


def _of_the_slowest(measured: Timeline, world: World) -> Timeline:
    """Rank 0's timeline, on all workers, with each step and what was prepared as on the slowest of them."""
    everyone = [
        msgspec.json.decode(data, type=Timeline)
        for data in gather_bytes(msgspec.json.encode(measured), world)
    ]
    # Step by step: another worker may be the slowest in each, and all wait for it.
    slowest = tuple(max(steps) for steps in zip(*(t.steps_ns for t in everyone), strict=True))
    prepared = [t.counters["compile_s"] for t in everyone if "compile_s" in t.counters]
    counters = dict(everyone[0].counters)
    if prepared:
        counters["compile_s"] = max(prepared)
    return msgspec.structs.replace(everyone[0], steps_ns=slowest, counters=counters)


def longest_s(plan: Plan) -> float:
    """Seconds after which a trial is stopped where none were given; infinite for what compiles nothing."""
    return LONGEST_S if is_compiled(plan) else math.inf


def limited(
    plan: Plan, world: World, left_s: float = math.inf
) -> contextlib.AbstractContextManager[None]:
    """Stops the trial of a worker alone when its time is up; see `run_trial`."""
    if world.size > 1:
        return contextlib.nullcontext()
    if math.isfinite(left_s):
        stopping_s = min(STOPPING_S, STOPPING_SHARE * left_s)
        return deadline(
            max(0.0, left_s - stopping_s), f"a trial of {label(plan)}", error=OutOfTimeError
        )
    return deadline(longest_s(plan), f"a trial of {label(plan)}")


def _run(
    step: PlannedStep,
    examples: Sequence[Any],
    world: World,
    left: Callable[[], float],
    hopeless_s: float,
) -> PeriodParts | None:
    """Warm up, then run as many steps as time allows; the parts in which an exchange was measured."""
    is_limited = math.isfinite(left())
    # A loss may take entries out of its batch: each step has containers of its own, as from a loader.
    batches = map(rebuilt, itertools.cycle(examples))
    # Compilers make a program for the second shape that serves the others; each is met twice.
    least = first_steps(step.plan) + 2 * (len(examples) - 1)
    is_held = exchange_steps(step.plan.sync) > 0
    step.begin_warm_up()
    if is_held:
        step.hold_exchanges()
    with _programs_tried_first(step, world):
        step_s = _warmed_up(step, batches, world, left if is_limited else None, least, hopeless_s)
    if world.size == 1 and not is_limited:
        # Not with limited seconds, of which waiting would take some; several workers would wait for one host.
        step_s = _at_usual_speed(step, batches, world, step_s)
    step.end_warm_up()
    wanted, alone = measured_steps(step_s, step.plan.sync)
    # It cannot win any more, so one step says enough.
    if max(WARM_S, hopeless_s) < step_s:
        wanted, alone = 1, 0
    # Of short steps so many are fixed at once, since asking for the time is an exchange between workers.
    if is_limited and step_s < LOOKED_AFTER_S:
        wanted = min(wanted, int(left() / step_s))
    if is_held and not alone:
        step.release_exchange()
    share = 0.0
    for number in range(wanted):
        if is_limited and step_s >= LOOKED_AFTER_S and step_s > left():
            break
        if alone and number == alone:
            share = step.release_exchange()
        try:
            if is_limited and step_s >= LOOKED_AFTER_S:
                step_s = _timed(step, next(batches), world)
            else:
                step(next(batches))
        except RidgelineError:
            raise
        except Exception:
            # One batch again and again may lead to values that the user's own checks refuse.
            if world.size > 1 or step.recorder.num_steps < FEWEST_STEPS:
                raise
            break
    if not step.recorder.num_steps:
        raise OutOfTimeError(_no_time(step, left(), step_s))
    return PeriodParts(alone, share) if alone else None


def _no_time(step: PlannedStep, left_s: float, step_s: float) -> str:
    return (
        f"wanted a measured step of {label(step.plan)}, got {units.seconds(max(0.0, left_s))} left where "
        f"one takes {units.seconds(step_s)}; allow more seconds"
    )


def _programs_tried_first(
    step: PlannedStep, world: World
) -> contextlib.AbstractContextManager[None]:
    """Has a child run what compiles for a CPU before this process does; several workers rehearse that."""
    if world.kind != "cpu" or world.size > 1 or not is_compiled(step.plan):
        return contextlib.nullcontext()
    return programs_tried_first(step.notes)


def _warmed_up(
    step: PlannedStep,
    batches: Iterator[Any],
    world: World,
    left: Callable[[], float] | None,
    least: int,
    hopeless_s: float,
) -> float:
    """Run `least` steps and on until they settle, or time or hope says enough; seconds of the last one.

    `left`, if any, gives the seconds that are left: several workers, whom nothing else stops, end here.

    Raises:
        OutOfTimeError: time is up before the first step that could be measured.
    """
    step_s = spent_s = 0.0
    for number in range(1, max(MOST_WARM_STEPS, least) + 1):
        before_s, step_s = step_s, _timed(step, next(batches), world)
        left_s = math.inf if left is None else left()
        if number >= least:
            spent_s += step_s
            is_settled = 0.0 < SETTLED * before_s <= step_s
            is_enough = left is not None or is_settled or step_s > hopeless_s
            # Before the last of the time: a step is measured then, else all was in vain.
            if (spent_s >= WARM_S and is_enough) or left_s < 2 * step_s:
                break
        elif left_s <= 0.0:
            raise OutOfTimeError(_no_time(step, left_s, step_s))
    return step_s


def _at_usual_speed(
    step: PlannedStep, batches: Iterator[Any], world: World, step_s: float
) -> float:
    """Continue while the host is slower than usual, for a while; seconds of the last step."""
    taken_s = [step_s]
    HOST_SPEED.wait(
        MOST_WAIT_S - step_s, lambda: taken_s.append(_timed(step, next(batches), world))
    )
    return taken_s[-1]


def _timed(step: PlannedStep, batch: Any, world: World) -> float:
    """Seconds of one step, rank 0's on all workers."""
    begin = time.perf_counter()
    float(step(batch))  # waits for a GPU
    return float(share_text(repr(max(time.perf_counter() - begin, 1e-9)), world))
