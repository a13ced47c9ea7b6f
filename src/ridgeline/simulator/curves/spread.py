"""Machines drawn from the measured one's spread: what predictions vary by because measurements do."""

import math
import random
from typing import Any

import msgspec

from ridgeline.laws.resampling import QUARTILES_IN_DEVIATIONS
from ridgeline.machine import Ceiling, Machine, Quantity

DRAWS = 20
"""Machines that are drawn for an interval."""
MOST_RATIO = 1e3
"""Of quartiles that numbers are drawn by: wider ones, which nobody measures, would make numbers infinite."""


def drawn_machines(machine: Machine, seed: int) -> list[Machine]:
    """The machine, and `DRAWS` others: numbers drawn around its medians as wide as its quartiles are apart.

    The same seed gives the same machines.
    """
    noise = random.Random(seed)
    return [machine, *(_drawn(machine, noise) for _ in range(DRAWS))]


def _drawn(value: Any, noise: random.Random) -> Any:
    """A copy with every measured number drawn anew, and what hangs on it in proportion."""
    # Before structs in general, of which it is one: all of its numbers move together.
    if isinstance(value, Quantity):
        return value.times(_factor(value, noise))
    if isinstance(value, Ceiling):
        factor = _factor(value.rate, noise)
        # The curve moves with its ceiling: drawn point by point it would cross it.
        curve = tuple(
            msgspec.structs.replace(point, rate=point.rate * factor) for point in value.curve
        )
        return msgspec.structs.replace(value, rate=value.rate.times(factor), curve=curve)
    if isinstance(value, tuple):
        return tuple(_drawn(part, noise) for part in value)
    if isinstance(value, msgspec.Struct):
        parts = {
            name: _drawn(field, noise)
            for name, field in msgspec.structs.asdict(value).items()
            if isinstance(field, (msgspec.Struct, tuple))
        }
        return msgspec.structs.replace(value, **parts)
    return value


def _factor(quantity: Quantity, noise: random.Random) -> float:
    """What a number is multiplied by; 1 where it has no spread."""
    # In their order, as an edited profile may not have them.
    low, high = sorted((quantity.low, quantity.high))
    if low <= 0.0 < high:
        # Of no logarithm, and yet the widest of all: as far below the median as the upper one is above it.
        low = quantity.value**2 / high
    if not 0.0 < low < high:
        return 1.0
    # In logarithms, as rates and seconds cannot fall below zero.
    width = math.log(min(high / low, MOST_RATIO)) / QUARTILES_IN_DEVIATIONS
    return math.exp(noise.gauss(0.0, width))
