"""The user's own step, timed as a whole and phase by phase, to hold the timings of its operators against."""

import itertools
import statistics
import time
from collections import defaultdict
from typing import Any

from ridgeline.decision.trial import limited
from ridgeline.errors import RidgelineError
from ridgeline.host_speed import HOST_SPEED, MOST_WAIT_S
from ridgeline.planner.trial_steps import FEWEST_STEPS, SETTLED
from ridgeline.reach.side_effects import refusing_writes
from ridgeline.runtime.step import TrainStep as PlannedStep
from ridgeline.runtime.world import World

MOST_WARM, MOST_STEPS = 5, 100
SPENT_S = 1.0
"""Steps that warm up, and steps that are timed, go on for this long; two are made of each at least."""
LONG_S = 4.0
"""Of steps that take longer one is made to warm up, and one is timed."""


def phase_seconds(step: PlannedStep, example: Any, world: World, left_s: float) -> dict[str, float]:
    """Median seconds that this process takes for each phase of an eager step that begins with an idle device.

    Clearing the gradients counts for the optimizer.

    Args:
        step: Eager, without accumulation; trains, which somebody takes back.
        example: Trained on.
        world: Of this worker alone.
        left_s: Seconds that it may take.

    Raises:
        OutOfTimeError: it takes longer.
        SideEffectError: the step writes outside of the process; it was kept from it.

    Cost: 4 steps, 2 of those that are long, about 2 s of short ones.
    """
    with limited(step.plan, world, left_s), refusing_writes():
        _warm_up(step, example)
        HOST_SPEED.wait(min(MOST_WAIT_S, left_s))
        samples = _samples(step, example)
    return {phase: statistics.median(seconds) for phase, seconds in samples.items()}


def _warm_up(step: PlannedStep, example: Any) -> None:
    """Make steps until one takes as long as that before it."""
    begin = now = time.perf_counter()
    before_s = 0.0
    for number in range(MOST_WARM):
        _timed(step, example)
        taken_s, now = time.perf_counter() - now, time.perf_counter()
        is_settled = taken_s >= SETTLED * before_s > 0.0
        if now - begin > LONG_S or (number > 0 and (is_settled or now - begin > SPENT_S)):
            break
        before_s = taken_s


def _samples(step: PlannedStep, example: Any) -> dict[str, list[float]]:
    """Seconds of the phases, step by step."""
    samples: dict[str, list[float]] = defaultdict(list)
    begin = time.perf_counter()
    for number in range(MOST_STEPS):
        spent_s = time.perf_counter() - begin
        if spent_s > LONG_S or (number > 1 and spent_s > SPENT_S):
            break
        try:
            taken = _timed(step, example)
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


def _timed(step: PlannedStep, example: Any) -> dict[str, float]:
    """Seconds of the phases of one step; waits for the device after it."""
    marks: list[tuple[str, float]] = [("optimizer", time.perf_counter())]
    earlier = step.recorder.listener
    step.recorder.listener = lambda name: marks.append((name, time.perf_counter()))
    try:
        loss = step(example)
        marks.append(("", time.perf_counter()))
    finally:
        step.recorder.listener = earlier
    float(loss)
    found: dict[str, float] = defaultdict(float)
    for (name, begin), (_, end) in itertools.pairwise(marks):
        found[name] += end - begin
    return found
