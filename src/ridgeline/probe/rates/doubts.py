"""Ceilings that contradict each other: what many threads reach must not be far below what one does."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.machine import Ceiling, Setting

LEAST_SHARE = 0.5
"""Of the rate of one thread alone, in all threads and workers of a setting together.

Source: assumed; threads that only get in each other's way still keep most of it.
"""


def doubts(ceilings: Sequence[Ceiling]) -> tuple[str, ...]:
    """A warning for each ceiling of the CPU that the one of a single thread contradicts."""
    alone = {
        (ceiling.family, ceiling.dtype): ceiling.rate.value
        for ceiling in ceilings
        if ceiling.setting == Setting(device="cpu", workers=1, threads=1)
    }
    found = []
    for ceiling in ceilings:
        one = alone.get((ceiling.family, ceiling.dtype))
        # A ceiling is that of one worker while all run.
        total = ceiling.rate.value * ceiling.setting.workers
        if ceiling.setting.device != "cpu" or one is None or total >= LEAST_SHARE * one:
            continue
        together, single = (units.quantity(rate, ceiling.rate.unit) for rate in (total, one))
        found.append(
            f"the ceiling of {ceiling.family} in {ceiling.dtype} at {ceiling.setting} is {together} in all, "
            f"less than half of the {single} that one thread reached alone: other programs most likely "
            "disturbed it; measure again with `ridgeline measure --refresh`"
        )
    return tuple(found)
