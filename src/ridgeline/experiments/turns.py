"""Fair comparison: figures of rivals that take turns, within a limit, and their ratios.

Figures are medians over the turns with quartiles; ratios are taken turn by turn.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from ridgeline.machine import Quantity
from ridgeline.recording.turns import turns_of

LEAST_TURNS = 3
"""Quartiles of fewer figures say nothing."""

Samples = dict[str, list[float]]
"""Rival to its figures, one a turn."""


def take_turns(
    rivals: Mapping[str, Callable[[], float]],
    *,
    turns: int,
    limit_s: float | None = None,
    least: int = LEAST_TURNS,
    each: Callable[[Samples], None] = lambda samples: None,
    agree: Callable[[bool], bool] = bool,
) -> Samples:
    """Let every rival give one figure a turn; every second turn goes the other way round.

    Args:
        rivals: Name to what measures one turn and returns its figure, seconds per call for example.
        turns: Turns to take.
        limit_s: No turn begins after this many seconds, once there are `least`; None: no limit.
        least: Turns to take in any case.
        each: Called after every turn with all figures so far.
        agree: Makes one decision to stop of those of all who take these turns together.
    """
    samples: Samples = {name: [] for name in rivals}
    begin = time.perf_counter()
    taken = turns_of(rivals)
    for turn in range(turns):
        is_late = limit_s is not None and time.perf_counter() - begin > limit_s
        # Asked by all in every turn, since it may be a collective.
        if turn >= least and agree(is_late):
            break
        for name, figure in next(taken).items():
            samples[name].append(figure)
        each(samples)
    return samples


def times_faster(samples: Mapping[str, Sequence[float]], base: str) -> dict[str, Quantity]:
    """How many times faster than `base` every rival is: its seconds over theirs, turn by turn."""
    return {
        name: Quantity.measured(
            [slow / fast for slow, fast in zip(samples[base], own, strict=True)], "x"
        )
        for name, own in samples.items()
    }
