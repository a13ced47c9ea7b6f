"""The staircase of memory as text for the terminal."""

import math
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.machine.stairs import Stair
from ridgeline.reporting.labels import spread
from ridgeline.reporting.terminal.text import bar, table, title

WIDTH = 30
SHORTEST_S = 1e-9
"""Where the bars begin; each decade is as long."""


def stairs_text(stairs: Sequence[Stair], caches: Mapping[str, int]) -> RenderableType:
    """What an access costs by the bytes that are walked through, and where caches end."""
    rows = table(
        ("Bytes", "Access", "Spread", "Read in order", "One word a line", ""), right=range(5)
    )
    # A cache ends at the last size that fits into it.
    for stair, after in zip(stairs, (*stairs[1:], None), strict=True):
        ends = [
            f"{name} ends"
            for name, size in caches.items()
            if stair.num_bytes <= size and (after is None or after.num_bytes > size)
        ]
        rows.add_row(
            units.num_bytes(stair.num_bytes),
            units.seconds(stair.access_s.value),
            spread(stair.access_s),
            units.quantity(stair.rate_in_order, "B/s"),
            units.seconds(stair.line_s.value),
            Text(f"{decades(stair.access_s.value)} {' '.join(ends)}", style="cyan"),
        )
    return Group(title("Staircase", "one access after another, by the bytes walked through"), rows)


def decades(seconds: float) -> str:
    """A bar that is longer by as much for each factor of ten."""
    # Six decades, up to a millisecond, fill the width.
    return bar(math.log10(max(seconds, SHORTEST_S) / SHORTEST_S) / 6.0, WIDTH)
