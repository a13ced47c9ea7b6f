"""The words in which transfers between devices are planned: copies, arrivals, and what operations read."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Copy(NamedTuple):
    """A value copied between devices, once for each device that needs it."""

    slot: int
    source: int
    target: int


class Arrival(NamedTuple):
    """The host waits here until something has landed in its memory.

    Attributes:
        of: The operation or copy that brings it.
    """

    of: int | Copy


Step = int | Copy | Arrival
"""What is issued: an operation, by its number, a copy, or a wait of the host."""


class Traffic(NamedTuple):
    """What operations read and make; everything about a program that a placement's copies follow from.

    Attributes:
        reads: For each operation the slots that it reads.
        makes: For each operation the slots that it fills.
        homes: Slot of an input or of state to the device that it is on.
        as_they_are: (operation, slot) where the operation takes the value from whatever device it
            is on: it moves it itself, or reads a number that the host holds.
        crossings: Operation to the device it copies from, for those that move values by themselves.
        moves: Those of them that merely have to be enqueued.
        results: Slots that the call returns; what they hold must have arrived by then.
    """

    reads: Sequence[Collection[int]]
    makes: Sequence[Collection[int]]
    homes: Mapping[int, int]
    as_they_are: Collection[tuple[int, int]] = ()
    crossings: Mapping[int, int] = {}
    moves: Collection[int] = ()
    results: frozenset[int] = frozenset()
