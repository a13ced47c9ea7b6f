"""What a host does to memory access and arithmetic, as text for the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline.microarchitecture import Microarchitecture
from ridgeline.reporting.microarchitecture import effects
from ridgeline.reporting.text import table, title


def microarchitecture_texts(known: Microarchitecture) -> list[RenderableType]:
    """A table and a sentence for each effect that was measured."""
    return [_text(*effect) for effect in effects(known)]


def _text(
    name: str, head: tuple[str, ...], rows: tuple[tuple[str, ...], ...], reading: str
) -> RenderableType:
    shown = table(head, right=range(1, len(head)))
    for row in rows:
        shown.add_row(*row)
    return Group(title(name, ""), *([shown] if rows else []), Text(reading))
