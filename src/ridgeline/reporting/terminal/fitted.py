"""What is drawn as wide as the terminal lets it be: bars, bands of letters over time, tables."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ridgeline.reporting.grid import Grid

BLOCK, ASCII_BLOCK = "█", "#"
BETWEEN = 3
"""Characters between two columns of a table."""
LEAST_WORDS = 12
"""Characters of a line in a column of words that can still be read."""


class FittedBar(NamedTuple):
    """A bar of `share` (0 to 1) of the width that it gets, `most` characters at most.

    As text it would be folded where its column is narrow, a few characters a line.
    """

    share: float
    most: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The bar, of characters that the output can encode."""
        block = ASCII_BLOCK if options.ascii_only else BLOCK
        yield Text(bar(self.share, min(self.most, options.max_width), block), style="cyan")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """One character at least, and as many as a whole bar has where there is room."""
        return Measurement(1, max(1, min(self.most, options.max_width)))


def bars(shares: Sequence[float], width: int) -> tuple[FittedBar, ...]:
    """A bar for each share of `width`, in a column that the longest one fills."""
    longest = max(shares, default=0.0) or 1.0
    most = len(bar(longest, width))
    return tuple(FittedBar(share / min(1.0, longest), most) for share in shares)


class FittedBand(NamedTuple):
    """A line that begins with `label`, and has as many characters of `drawn` behind it as fit.

    `drawn` makes it, of as many characters as it is given, `most` at most.
    """

    label: str
    drawn: Callable[[int], Text]
    most: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line."""
        width = max(1, min(self.most, options.max_width - len(self.label)))
        yield Text.assemble(self.label, self.drawn(width))


def bar(share: float, width: int, block: str = BLOCK) -> str:
    """A bar of `share` (0 to 1) of `width` characters; at least one when there is anything."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return block * (max(1, filled) if share > 0 else 0)


class FittedTable(NamedTuple):
    """A table, or a line for each of its rows where the terminal is too narrow for its numbers.

    Rich would cut numbers off at the end of their columns, and what is left of 117000 is read as 11.

    Attributes:
        table: As rich draws it.
        grid: What is in it.
    """

    table: Table
    grid: Grid

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows in words."""
        if options.max_width >= self._least:
            yield self.table
            return
        for first, *others in self.grid.rows:
            named = zip(self.grid.head[1:], others, strict=True)
            # Words have no heading that explains them, and cells without a number say nothing.
            parts = [f"{head} {cell}".strip() for head, cell in named if cell]
            yield Text(f"{self.grid.head[0]} {first}".strip() + ": " + ", ".join(parts))

    @property
    def _least(self) -> int:
        """The width at which all numbers are whole, and words can be read."""
        columns = zip(self.grid.head, *self.grid.rows, strict=True)
        widths = [max(map(len, cells)) for cells in columns]
        numeric = self.grid.numeric
        needed = [
            width if index in numeric else min(width, LEAST_WORDS)
            for index, width in enumerate(widths)
        ]
        needed += [1] * bool(self.grid.bars)
        return sum(needed) + BETWEEN * (len(needed) - 1)
