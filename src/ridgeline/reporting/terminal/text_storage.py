"""What reading and writing files costs, as text for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType

from ridgeline import units
from ridgeline.machine.storage import Storage
from ridgeline.reporting.terminal.text import table, title
from ridgeline.reporting.terminal.text_stairs import spread


def storage_text(storage: Sequence[Storage]) -> RenderableType:
    """A table for each file system: what a block takes, and what all threads together move."""
    parts: list[RenderableType] = []
    for one in storage:
        rows = table(("", "Each takes", "Spread", "Rate", "Spread", "A second"), right=range(1, 6))
        for access in one.accesses:
            rows.add_row(
                access.name,
                units.seconds(access.seconds.value),
                spread(access.seconds),
                units.quantity(access.rate.value, "B/s"),
                spread(access.rate),
                units.digits3(access.blocks_per_s),
            )
        parts += [title("Storage", f"{one.place}; {one.meaning}"), rows]
    return Group(*parts)
