"""Samples of several loops, taken in turns: what changes on the host meanwhile meets all of them alike."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from ridgeline.quantity import Sampled

Name = TypeVar("Name")


def in_turns(
    loops: Mapping[Name, Callable[[], float]], rounds: int
) -> dict[Name, tuple[float, ...]]:
    """So many samples of each loop, as the loops return them; those of a round belong together.

    The order of a round is reversed in every second round, so that no loop always follows the same one.
    """
    names = list(loops)
    found: dict[Name, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            found[name].append(loops[name]())
    return {name: tuple(samples) for name, samples in found.items()}


def ratio(over: tuple[float, ...], under: tuple[float, ...]) -> Sampled:
    """The quotients of two loops, round by round."""
    return Sampled.measured([a / b for a, b in zip(over, under, strict=True)], "x")
