"""What a host grants a process, what its files cost and how it slows a step, as text for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.machine.limits import Limit
from ridgeline.machine.storage import Storage
from ridgeline.reporting.effects.effects import Effect
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


def limits_text(limits: Sequence[Limit]) -> RenderableType:
    """One line for each limit: of what, how much of how much, who says so, and what follows."""
    rows = table(("What", "Granted", "By", "What follows"), right=(1,))
    for limit in limits:
        rows.add_row(limit.what, limit.amount, limit.by, limit.follows)
    return Group(title("Limits", "what the host allows this process"), rows)


def effect_texts(effects: Sequence[Effect]) -> list[RenderableType]:
    """A table and a sentence for each effect that was measured."""
    return [_effect_text(effect) for effect in effects]


def _effect_text(effect: Effect) -> RenderableType:
    shown = table(effect.head, right=range(1, len(effect.head)))
    for row in effect.rows:
        shown.add_row(*row)
    return Group(title(effect.title, ""), *([shown] if effect.rows else []), Text(effect.reading))
