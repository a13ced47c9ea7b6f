"""The user's own step, timed as a whole and phase by phase, to hold the timings of its operators against."""

import itertools
import statistics
import time
from collections import defaultdict
from typing import Any

import msgspec

from ridgeline import units
from ridgeline.decision.trial import limited
from ridgeline.errors import OutOfTimeError, RidgelineError
from ridgeline.host.speed import HOST_SPEED, MOST_WAIT_S
from ridgeline.planner.trials.trial_steps import FEWEST_STEPS, SETTLED
from ridgeline.reach.side_effects import refusing_writes
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.agree import failing_together, gather_bytes, largest_of_workers
from ridgeline.workers.world import World

MOST_WARM, MOST_STEPS = 5, 100
SPENT_S = 1.0
"""Steps that warm up, and steps that are timed, continue for this long; two are made of each at least."""
LONG_S = 4.0
"""Of steps that take longer one is made to warm up, and one is timed."""


class OtherFailedError(Exception):
    """Another worker's step failed; treated here as what its own code raised is treated there."""


def phase_seconds(step: PlannedStep, example: Any, world: World, left_s: float) -> dict[str, float]:
    """Median seconds that a process takes for each phase of an eager step that begins with an idle device.

    Clearing the gradients counts for the optimizer. Of several workers, all get what the slowest takes.

    Args:
        step: Eager, without accumulation, of this worker alone; trains, which the caller takes back.
        example: Trained on.
        world: The workers, which make their steps at once, as many each.
        left_s: Seconds that it may take; of several workers, the first step may take as long as it takes.

    Raises:
        OutOfTimeError: it takes longer.
        SideEffectError: the step writes outside of the process; it was kept from it.
        OtherFailedError: the step of another worker failed.

    Cost: 4 steps, 2 of those that are long, about 2 s of short ones.
    """
    begin = time.perf_counter()
    with limited(step.plan, world, left_s), refusing_writes():
        step_s = _warm_up(step, example, world)
        if world.size > 1 and _any(time.perf_counter() - begin + step_s > left_s, world):
            raise OutOfTimeError(
                f"wanted another step within {units.seconds(left_s)}, got one of {units.seconds(step_s)}; "
                "allow more seconds"
            )
        if world.size == 1:  # of several one would wait while others work
            HOST_SPEED.wait(min(MOST_WAIT_S, left_s))
        samples = _samples(step, example, world)
    mine = {phase: statistics.median(seconds) for phase, seconds in samples.items()}
    everyone = gather_bytes(msgspec.json.encode(mine), world)
    found = [msgspec.json.decode(data, type=dict[str, float]) for data in everyone]
    # The phases of one worker, not the largest of each: they have to add up to a step.
    return max(found, key=lambda seconds: sum(seconds.values()))


def _warm_up(step: PlannedStep, example: Any, world: World) -> float:
    """Make steps until one takes as long as that before it; seconds of the last one."""
    begin = time.perf_counter()
    before_s = 0.0
    for number in range(MOST_WARM):
        now = time.perf_counter()
        _made(step, example, world)
        taken_s, spent_s = time.perf_counter() - now, time.perf_counter() - begin
        is_settled = taken_s >= SETTLED * before_s > 0.0
        is_over = spent_s > LONG_S or (number > 0 and (is_settled or spent_s > SPENT_S))
        before_s = taken_s
        if _any(is_over, world):
            break
    return before_s


def _samples(step: PlannedStep, example: Any, world: World) -> dict[str, list[float]]:
    """Seconds of the phases, step by step."""
    samples: dict[str, list[float]] = defaultdict(list)
    begin = time.perf_counter()
    for number in range(MOST_STEPS):
        spent_s = time.perf_counter() - begin
        if _any(spent_s > LONG_S or (number > 1 and spent_s > SPENT_S), world):
            break
        try:
            taken = _made(step, example, world)
        except RidgelineError:
            raise
        except Exception:
            # One batch again and again may lead to values that the user's own checks refuse.
            if number < FEWEST_STEPS:
                raise
            break
        for phase, seconds in taken.items():
            samples[phase].append(seconds)
    return samples


def _made(step: PlannedStep, example: Any, world: World) -> dict[str, float]:
    """Seconds of the phases of one step, which all workers make, or none continues."""
    with failing_together(world, OtherFailedError("the step of another worker failed")):
        return _timed(step, example)


def _any(is_so: bool, world: World) -> bool:
    """Whether it is so on any worker: how many steps there are, all decide alike."""
    return bool(largest_of_workers(float(is_so), world))


def _timed(step: PlannedStep, example: Any) -> dict[str, float]:
    """Seconds of the phases of one step; waits for the device after it."""
    # Clearing gradients comes before the first mark of a recorder, and is part of the optimizer's loop.
    marks: list[tuple[str, float]] = [("optimizer", time.perf_counter())]
    earlier = step.recorder.listener
    step.recorder.listener = lambda name: marks.append((name, time.perf_counter()))
    try:
        loss = step(example)
        marks.append(("", time.perf_counter()))
    finally:
        step.recorder.listener = earlier
    # Waits for the device, so that the next step begins with an idle one.
    float(loss)
    found: dict[str, float] = defaultdict(float)
    for (name, begin), (_, end) in itertools.pairwise(marks):
        found[name] += end - begin
    return found
