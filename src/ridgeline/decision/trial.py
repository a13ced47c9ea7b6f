"""A trial: a plan run for some steps on an example batch and undone, so that it leaves no trace."""

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.reach.undo import Undo
from ridgeline.runtime.agree import gather_bytes, share_bytes
from ridgeline.runtime.hybrid.loaded_programs import ProgramWatch
from ridgeline.runtime.step import TrainStep as PlannedStep
from ridgeline.runtime.world import World
from ridgeline.timeline import Timeline

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ridgeline.runtime.body import LossFunction

FIRST_STEPS = 6
"""Before the clock counts: libraries settle, graphs are captured."""
LEAST_STEPS = 8
MOST_STEPS = 100
MEASURED_S = 1.0
"""Seconds of steps that a trial measures where they are short; a GPU's clock settles meanwhile."""


def run_trial(
    make: Callable[[Plan], PlannedStep],
    plan: Plan,
    model: "nn.Module",
    loss_fn: "LossFunction",
    optimizer: "Optimizer",
    example: Any,
    world: World,
) -> Timeline:
    """The measured timeline of a plan; model, optimizer and random state are put back.

    A step lasts as long as it does on the slowest worker. All workers call this, and all get rank 0's
    timeline.

    Args:
        make: The step of a plan.
        plan: Tried on `example`.
        model: Trained meanwhile.
        loss_fn: Other networks that it reads are put back too.
        optimizer: Put back with its settings.
        example: A batch.
        world: This worker's place.

    Cost: The steps, and copies of parameters, buffers and optimizer state.
    """
    before = Undo(model, loss_fn, optimizer, example)
    watch = ProgramWatch()
    try:
        step = make(plan)
        try:
            measured = _measured(step, example, world)
        finally:
            step.close()
    finally:
        before.restore()
    if world.rank == 0 and MODES[plan.execution].is_compiled:
        measured = watch.noted(measured)
    everyone = [
        msgspec.json.decode(data, type=Timeline)
        for data in gather_bytes(msgspec.json.encode(measured), world)
    ]
    slowest = tuple(max(steps) for steps in zip(*(t.steps_ns for t in everyone), strict=True))
    prepared = [t.counters["compile_s"] for t in everyone if "compile_s" in t.counters]
    counters = dict(everyone[0].counters)
    if prepared:
        counters["compile_s"] = max(prepared)
    return msgspec.structs.replace(everyone[0], steps_ns=slowest, counters=counters)


def _measured(step: PlannedStep, example: Any, world: World) -> Timeline:
    for _ in range(FIRST_STEPS):
        step(example)
    float(step(example))  # waits for a GPU
    begin = time.perf_counter()
    float(step(example))
    step_s = max(time.perf_counter() - begin, 1e-9)
    wanted = min(MOST_STEPS, max(LEAST_STEPS, math.ceil(MEASURED_S / step_s)))
    for _ in range(int(share_bytes(str(wanted).encode(), world))):
        step(example)
    return step.timeline()
