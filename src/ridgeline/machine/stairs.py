"""`Stair`: what memory costs by how much of it is used; times by size make a staircase of its levels."""

from ridgeline.codec import Value
from ridgeline.machine.quantity import Quantity

WORD_BYTES = 8


class Stair(Value, frozen=True, kw_only=True):
    """What memory costs where so many bytes are walked through again and again.

    `access_s` is a load that waits for the one before it, somewhere in them; `word_s` 8 bytes where all are
    read in order; `line_s` 8 bytes where one word of every line is read, none waiting for another.
    """

    num_bytes: int
    access_s: Quantity
    word_s: Quantity
    line_s: Quantity
    large_page_bytes: int | None = None
    """Of this process, while it walked; None where the system does not say."""

    @property
    def rate_in_order(self) -> float:
        """Bytes per second of one core that reads all in order."""
        return WORD_BYTES / self.word_s.value

    @property
    def rate_at_random(self) -> float:
        """Bytes per second of one core whose loads of 8 bytes wait for each other."""
        # Of a line only one word is used, so this is far below what the memory moves.
        return WORD_BYTES / self.access_s.value
