"""What a process is granted of its host, as text for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType

from ridgeline.machine.limits import Limit
from ridgeline.reporting.terminal.text import table, title


def limits_text(limits: Sequence[Limit]) -> RenderableType:
    """One line for each limit: of what, how much of how much, who says so, and what follows."""
    rows = table(("What", "Granted", "By", "What follows"), right=(1,))
    for limit in limits:
        rows.add_row(limit.what, limit.amount, limit.by, limit.follows)
    return Group(title("Limits", "what the host allows this process"), rows)
