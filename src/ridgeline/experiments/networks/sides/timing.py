"""Figures of forms that take turns: each turn some steps, and the slowest worker counts."""

from collections.abc import Callable, Mapping

import torch.distributed as dist
from torch import Tensor

from ridgeline.experiments.turns import LEAST_TURNS, Samples, take_turns
from ridgeline.probe.timing import synchronize, time_block
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World

WARMUP_STEPS = 3
TURN_S = 0.25
"""What one turn lasts about, where the number of its steps is not given."""
LEAST_TURN_S = 0.02
"""A turn of short steps gets more of them: starting and ending one takes as long as several."""
MOST_STEPS = 200
MOST_SHORT_STEPS = 1000
ROUGH_TURNS = 3

Step = Callable[[], Tensor]


def turn_of(step: Step, steps: int, world: World) -> Callable[[], float]:
    """Measures one turn: seconds a step, of the slowest worker."""

    def turn() -> float:
        if world.size > 1:
            # From a common start, or a worker would wait for a later one within its time.
            synchronize()
            dist.barrier(group=world.group())
        return largest_of_workers(time_block(step, steps), world)

    return turn


def time_forms(
    forms: Mapping[str, Step],
    world: World,
    *,
    turns: int,
    steps: int,
    limit_s: float | None = None,
    each: Callable[[Samples], None] = lambda samples: None,
) -> Samples:
    """Seconds a step of each form, one figure a turn, after some steps to warm up.

    Args:
        forms: Name to a step.
        world: All its workers call this with the same forms.
        turns: Turns to take.
        steps: Steps in a turn, more where those are over at once; 0: as many as fill one for the first form.
        limit_s: No turn begins after this many seconds, once there are a few; one worker only.
        each: Called after every turn with all figures so far.
    """
    for step in forms.values():
        for _ in range(WARMUP_STEPS):
            step()
    synchronize()
    # The same number of steps for all, or their figures would not compare.
    count = steps_of_turn(next(iter(forms.values())), world, steps)
    rivals = {name: turn_of(step, count, world) for name, step in forms.items()}
    # Workers that looked at their own clocks would stop at different turns.
    limit = limit_s if world.size == 1 else None
    return take_turns(rivals, turns=turns, limit_s=limit, least=min(turns, LEAST_TURNS), each=each)


def rough_s(step: Step, steps: int, world: World) -> float:
    """Seconds a step of a form that runs alone: the best of a few short turns."""
    return min(time_forms({"": step}, world, turns=ROUGH_TURNS, steps=steps)[""])


def steps_of_turn(step: Step, world: World, wanted: int = 0) -> int:
    """How many steps make a turn: those wanted, but enough to last; 0: as many as fill one."""
    # As the slowest has it, so that all take the same number of steps.
    once_s = largest_of_workers(min(time_block(step, 2) for _ in range(2)), world)
    if wanted:
        return max(wanted, min(MOST_SHORT_STEPS, round(LEAST_TURN_S / once_s)))
    return max(2, min(MOST_STEPS, round(TURN_S / once_s)))
