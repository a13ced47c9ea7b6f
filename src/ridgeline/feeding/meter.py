"""Meter: adds up when copies and computation ran, from the moments that streams left behind.

Moments are read in windows, once they are over, so that nothing is waited for and a long run stays
bounded; a window keeps its neighbours, because a copy overlaps the computation of other batches.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.feeding.channel import Channel, Moment
from ridgeline.feeding.report import Interval, covered_s

WINDOW = 64
"""Batches read at a time."""


class Totals(NamedTuple):
    """Seconds of copies, of computation, and of copies during computation."""

    copy_s: float = 0.0
    compute_s: float = 0.0
    covered_s: float = 0.0


class Trace(NamedTuple):
    """The moments of one batch: begin and end of its copy, if any, and of its computation."""

    copy: tuple[Moment, Moment] | None
    compute: tuple[Moment, Moment]


class Meter:
    """Totals over the batches of one channel.

    The copy of a batch may overlap the computation of `margin` batches before and after it.
    """

    def __init__(self, channel: Channel, margin: int) -> None:
        self._channel = channel
        self._margin = margin
        self._traces: list[Trace] = []
        self._num_counted = 0  # of the traces kept: those that are in the totals already
        self._totals = Totals()

    def add(self, trace: Trace) -> None:
        """Note the next batch, and read a window if one is full and over."""
        self._traces.append(trace)
        end = len(self._traces) - self._margin
        is_full = end - self._num_counted >= WINDOW
        if is_full and self._are_over():
            self._totals = self._count(end)
            # Neighbours stay, since copies of later batches overlap the computing of these.
            keep = max(0, end - self._margin)
            self._num_counted = end - keep
            del self._traces[:keep]

    def totals(self) -> Totals:
        """Totals over all batches noted.

        Cost: Waits for their copies and their computation.
        """
        for trace in self._traces:
            for moment in _ends(trace):
                self._channel.wait(moment)
        return self._count(len(self._traces))

    def _are_over(self) -> bool:
        # The newest first: of all it is the most likely not to be over, and then the others need no asking.
        ends = (moment for trace in reversed(self._traces) for moment in _ends(trace))
        return all(self._channel.is_over(moment) for moment in ends)

    def _count(self, end: int) -> Totals:
        """The totals with the traces up to `end` in them."""
        if not self._traces:
            return self._totals
        anchor = self._traces[0].compute[0]
        computes = [self._interval(anchor, trace.compute) for trace in self._traces]
        counted = self._traces[self._num_counted : end]
        copies = [self._interval(anchor, trace.copy) for trace in counted if trace.copy]
        return Totals(
            self._totals.copy_s + _sum(copies),
            self._totals.compute_s + _sum(computes[self._num_counted : end]),
            self._totals.covered_s + covered_s(copies, computes),
        )

    def _interval(self, anchor: Moment, pair: tuple[Moment, Moment]) -> Interval:
        begin, end = pair
        return self._channel.seconds(anchor, begin), self._channel.seconds(anchor, end)


def _ends(trace: Trace) -> list[Moment]:
    return [trace.compute[1], *([trace.copy[1]] if trace.copy else [])]


def _sum(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
