"""What a machine does to a training step, as text for the terminal."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline.reporting.effects.effects import Effect
from ridgeline.reporting.terminal.text import table, title


def effect_texts(effects: Sequence[Effect]) -> list[RenderableType]:
    """A table and a sentence for each effect that was measured."""
    return [_text(*effect) for effect in effects]


def _text(
    name: str, head: tuple[str, ...], rows: tuple[tuple[str, ...], ...], reading: str
) -> RenderableType:
    shown = table(head, right=range(1, len(head)))
    for row in rows:
        shown.add_row(*row)
    return Group(title(name, ""), *([shown] if rows else []), Text(reading))
