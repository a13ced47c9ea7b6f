"""What rich prints, as the text of a file."""

import io

from rich.console import Console, RenderableType

from ridgeline.reporting.terminal.text import PIPED_WIDTH


def as_text(*parts: RenderableType, width: int = PIPED_WIDTH) -> str:
    """The parts as plain text, as they would be printed to a file."""
    buffer = io.StringIO()
    target = Console(file=buffer, highlight=False, width=width, color_system=None)
    for part in parts:
        target.print(part)
    return buffer.getvalue()
