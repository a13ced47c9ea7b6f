"""Outages that a training went through, for the page and the terminal."""

from rich.console import RenderableType

from ridgeline import units
from ridgeline.history import History
from ridgeline.reporting.page.html import Markup, join, table, tag
from ridgeline.reporting.terminal.text import warnings


def outages_reading(history: History) -> str:
    """How many there were, and how long the longest was; empty without any."""
    count = len(history.outages)
    if not count:
        return ""
    longest_s = max(outage.lasted_s for outage in history.outages)
    return (
        f"training continued after {units.counted(count, 'outage')} of servers, the longest of "
        f"{units.seconds(longest_s)}"
    )


def outages_table(history: History) -> Markup | None:
    """Who missed which server, since when, how long, and what was sent again; None without any."""
    if not history.outages:
        return None
    head = ("Server", "Missed by", "Since", "For", "Pushes sent again", "Then")
    rows = [
        (
            str(outage.server),
            f"worker {outage.worker}",
            units.moment(outage.began_at),
            units.seconds(outage.lasted_s),
            str(outage.pushes_again),
            f"{'replaced, now' if outage.is_replaced else 'back'} at {outage.address}",
        )
        for outage in history.outages
    ]
    caption = "Times in which workers got no answer from a server"
    return join((tag("h3", "Outages"), table(head, rows, caption=caption, numeric=(3, 4))))


def outages_text(history: History) -> list[RenderableType]:
    """A line for each."""
    return [*warnings(map(str, history.outages))]
