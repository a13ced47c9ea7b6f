"""What a feed or a result stream says about itself: how much of its work the computation hid."""

import bisect
from collections.abc import Sequence
from typing import Literal

from ridgeline import units
from ridgeline.codec import Value

Interval = tuple[float, float]
"""Begin and end, seconds on one clock."""

Stage = Literal["loader", "copy", "compute", "nothing"]


class CopyReport(Value, frozen=True, kw_only=True):
    """What `rl.feed` or `rl.to_host` has moved so far, and what of it was hidden.

    Attributes:
        direction: `in` for a feed, `out` for results.
        device: Where the batches went or the results came from.
        batches: Batches or results handed over.
        num_bytes: Bytes copied between host and device.
        loading_s: Seconds spent in the loader (and in copying to pinned memory); for results, in making them.
        copy_s: Seconds during which a copy between host and device ran.
        compute_s: Seconds of the consumer's own work: on a GPU, of its stream; else of its thread.
        waited_s: Seconds during which the host had to wait for a batch or a result.
        hidden: Share (0..1) that computation covered: of `copy_s`, where a GPU takes part; else of
            `loading_s`, namely what no step had to wait for (threads that share a core slow each other
            down, which this does not see). None while there is nothing to hide.
        given_away: Pieces of memory that a caller still held when their turn came; left to it and replaced.
        bound: The stage that takes longest, and so sets the pace.
    """

    direction: Literal["in", "out"]
    device: str
    batches: int
    num_bytes: int
    loading_s: float
    copy_s: float
    compute_s: float
    waited_s: float
    hidden: float | None
    given_away: int
    bound: Stage

    @property
    def bytes_per_s(self) -> float | None:
        """Rate of the copies while they ran; None if nothing was copied."""
        return self.num_bytes / self.copy_s if self.copy_s > 0 else None

    def __repr__(self) -> str:
        name = "feed" if self.direction == "in" else "to_host"
        rate = self.bytes_per_s
        parts = [
            f"{self.batches} {'batches' if self.direction == 'in' else 'results'}",
            f"hid {units.percent(self.hidden)}" if self.hidden is not None else "nothing to hide",
            f"waited {units.seconds(self.waited_s)}",
            f"bound by {self.bound}",
        ]
        if rate is not None:
            size = units.num_bytes(self.num_bytes)
            parts.insert(1, f"{size} copied at {units.quantity(rate, 'B/s')}")
        if self.given_away:
            parts.append(f"{self.given_away} buffers given away")
        return f"{name} on {self.device}: {', '.join(parts)}"


def covered_s(inner: Sequence[Interval], outer: Sequence[Interval]) -> float:
    """Seconds of `inner` during which some interval of `outer` runs.

    Each interval of `inner` counts by itself; those of `outer` may overlap each other.
    """
    merged = _merge(outer)
    covered = 0.0
    for begin, end in inner:
        # The last that begins no later than this one is the first that can reach into it.
        position = max(0, bisect.bisect_right(merged, begin, key=lambda other: other[0]) - 1)
        while position < len(merged) and merged[position][0] < end:
            other_begin, other_end = merged[position]
            covered += max(0.0, min(end, other_end) - max(begin, other_begin))
            position += 1
    return covered


def hidden_share(*, covered: float, total: float) -> float | None:
    """The hidden share of `total` seconds of which `covered` were; None of nothing."""
    return min(1.0, max(0.0, covered / total)) if total > 0 else None


def bounding_stage(*, loading_s: float, copy_s: float, compute_s: float) -> Stage:
    """The stage with the most seconds; the later one of equals, `nothing` if none took any."""
    stages: tuple[tuple[float, Stage], ...] = (
        (compute_s, "compute"),
        (copy_s, "copy"),
        (loading_s, "loader"),
    )
    most, stage = max(stages, key=lambda entry: entry[0])
    return stage if most > 0 else "nothing"


def _merge(intervals: Sequence[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
