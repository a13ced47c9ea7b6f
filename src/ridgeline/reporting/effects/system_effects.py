"""What files cost and what the host allows, as tables."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.machine.limits import Limit
from ridgeline.machine.storage import Storage
from ridgeline.reporting.effects.cells import rate, seconds
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import as_sentence


def storage_effects(storage: Sequence[Storage]) -> tuple[Grid, ...]:
    """A table for each file system: what a block takes, and what all threads together move."""
    head = ("", "Each takes", "Spread", "Rate", "Spread", "A second", "Samples")
    return tuple(
        Grid(
            "Storage",
            head,
            tuple(
                (
                    access.name,
                    *seconds(access.seconds),
                    *rate(access.rate),
                    units.digits3(access.blocks_per_s),
                    str(access.seconds.n),
                )
                for access in one.accesses
            ),
            as_sentence(f"{one.place}; {one.meaning}"),
        )
        for one in storage
    )


def limits_effects(limits: Sequence[Limit]) -> tuple[Grid, ...]:
    """A row for each limit: of what, how much of how much, who says so, and what follows."""
    if not limits:
        return ()
    rows = tuple((limit.what, limit.amount, limit.by, limit.follows) for limit in limits)
    reading = "This is what the host allows this process."
    return (Grid("Limits", ("What", "Granted", "By", "What follows"), rows, reading, right=(1,)),)
