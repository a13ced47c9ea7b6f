"""Outages that a training went through, in the report's section on the training."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.history import Outage
from ridgeline.reporting.grid import Grid


def outages_reading(outages: Sequence[Outage]) -> str:
    """How many there were, and how long the longest was; needs one at least."""
    longest_s = max(outage.lasted_s for outage in outages)
    return (
        f"training continued after {units.counted(len(outages), 'outage')} of servers, the longest of "
        f"{units.seconds(longest_s)}"
    )


def outages_grid(outages: Sequence[Outage]) -> Grid:
    """Who missed which server, since when, how long, and what was sent again."""
    head = ("Server", "Missed by", "Since", "For", "Pushes sent again", "Then")
    rows = tuple(
        (
            str(outage.server),
            f"worker {outage.worker}",
            units.moment(outage.began_at),
            units.seconds(outage.lasted_s),
            str(outage.pushes_again),
            f"{'replaced, now' if outage.is_replaced else 'back'} at {outage.address}",
        )
        for outage in outages
    )
    return Grid("Outages", head, rows, right=(3, 4))
