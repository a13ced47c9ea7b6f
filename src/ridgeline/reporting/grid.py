"""`Grid`: a table of words and numbers, made once for the terminal and for the page."""

from collections.abc import Sequence
from typing import NamedTuple


class Grid(NamedTuple):
    """A table, its heading, and what it means.

    Attributes:
        title: Its heading.
        head: Titles of the columns.
        rows: Cells in these columns; a line break within one is kept.
        reading: What it means, in sentences; empty: nothing is said.
        right: Columns of numbers, set to the right; None: all but the first.
        bars: A fraction (0 to 1) for each row, which a terminal draws as a bar behind it; none: no bars.
        chosen: The row that stands out; None: none does.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reading: str = ""
    right: Sequence[int] | None = None
    bars: tuple[float, ...] = ()
    chosen: int | None = None

    @property
    def numeric(self) -> Sequence[int]:
        """The columns that are set to the right."""
        return range(1, len(self.head)) if self.right is None else self.right
