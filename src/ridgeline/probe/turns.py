"""Samples of several loops, taken in turns for a while and spread over it."""

import time
from collections.abc import Callable, Mapping, Sequence

from ridgeline.machine.quantity import Sampled
from ridgeline.recording.turns import Name, Taken, turns_of


def in_turns(
    loops: Mapping[Name, Callable[[], Taken]],
    rounds: int,
    least_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Name, tuple[Taken, ...]]:
    """So many samples of each loop, as the loops return them; those of a round belong together.

    See `turns_of` for the order of a round.
    Where `rounds` are over sooner than in `least_s` there are more, and some are kept, evenly: others who use
    the host come and go within seconds, and samples of a moment would know nothing of them.

    Args:
        loops: Each returns a sample.
        rounds: That are kept.
        least_s: Seconds that they are spread over.
        clock: Seconds.
    """
    turns, found = turns_of(loops), list[dict[Name, Taken]]()
    begin = clock()
    while len(found) < rounds or clock() < begin + least_s:
        found.append(next(turns))
    kept = evenly(found, rounds)
    return {name: tuple(samples[name] for samples in kept) for name in loops}


def evenly(found: Sequence[Taken], most: int) -> list[Taken]:
    """So many of these at most, as far apart as can be, in their order."""
    count = min(most, len(found))
    # From all of the time, as neighbours in time are disturbed together.
    return [found[place * len(found) // count] for place in range(count)]


def ratio(over: tuple[float, ...], under: tuple[float, ...]) -> Sampled:
    """The quotients of two loops, round by round."""
    return Sampled.measured([a / b for a, b in zip(over, under, strict=True)], "x")
