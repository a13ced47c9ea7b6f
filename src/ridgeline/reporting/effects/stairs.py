"""The staircase of memory as a table."""

import math
from collections.abc import Mapping, Sequence

from ridgeline import units
from ridgeline.machine.stairs import Stair
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import spread

SHORTEST_S = 1e-9
"""Where the bars begin; each decade is as long."""
DECADES = 6.0
"""Up to a millisecond fill a bar."""


def stairs_grid(stairs: Sequence[Stair], caches: Mapping[str, int]) -> Grid:
    """What an access costs by the bytes that are walked through, and where caches end."""
    sizes = [stair.num_bytes for stair in stairs]
    # A cache ends at the last size that fits into it.
    ends = {
        name: max((known for known in sizes if known <= size), default=0)
        for name, size in caches.items()
    }
    rows = tuple(
        (
            units.num_bytes(stair.num_bytes),
            units.seconds(stair.access_s.value),
            spread(stair.access_s),
            units.quantity(stair.rate_in_order, "B/s"),
            units.seconds(stair.line_s.value),
            ", ".join(f"{name} ends" for name, end in ends.items() if end == stair.num_bytes),
        )
        for stair in stairs
    )
    head = ("Bytes", "Access", "Spread", "Read in order", "One word a line", "")
    bars = tuple(decades(stair.access_s.value) for stair in stairs)
    return Grid("Staircase", head, rows, right=range(5), bars=bars)


def decades(seconds: float) -> float:
    """The length of a bar that grows by as much for each factor of ten, as a fraction."""
    return math.log10(max(seconds, SHORTEST_S) / SHORTEST_S) / DECADES
