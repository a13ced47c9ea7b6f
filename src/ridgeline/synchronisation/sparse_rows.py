"""What exchanging sparse gradients by their rows costs: bytes handed over, collectives, memory traffic."""

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.synchronisation.entries import CollectiveTraffic, one_all_reduce

NUMBER_BYTES = 8
"""Of the number of a row, and of how many there are."""


class RowsToSend(NamedTuple):
    """What a worker has of one gradient.

    `dense_bytes` are of the whole gradient, where it is dense after all; then there are no rows.
    """

    num_rows: int
    row_bytes: int
    dense_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """What the worker hands over: numbers and rows, or everything."""
        return self.dense_bytes or self.num_rows * (NUMBER_BYTES + self.row_bytes)


def rows_bytes(gradients: Sequence[RowsToSend]) -> int:
    """Bytes that a worker hands over of its rows in a step; dense gradients are no part of them."""
    return sum(one.num_bytes for one in gradients if not one.dense_bytes)


def rows_traffic(gradients: Sequence[RowsToSend], workers: int) -> tuple[CollectiveTraffic, ...]:
    """The collectives of a step: how many rows there are, their numbers, the rows, and what is dense.

    All workers have as many rows; one alone sends nothing.
    """
    if workers == 1 or not gradients:
        return ()
    num_rows = sum(one.num_rows for one in gradients)
    # Counts travel first and alone: without them no worker knows how much it will receive of the others.
    sizes = (
        NUMBER_BYTES * len(gradients),
        NUMBER_BYTES * num_rows,
        rows_bytes(gradients) - NUMBER_BYTES * num_rows,
    )
    # The gathered whole, as size tables have it; all workers are taken to have as many rows.
    gathered = tuple(CollectiveTraffic("all_gather", size * workers) for size in sizes if size)
    dense = (one_all_reduce(one.dense_bytes, workers) for one in gradients if one.dense_bytes)
    return (*gathered, *(part for parts in dense for part in parts))


def rows_memory_bytes(gradients: Sequence[RowsToSend], workers: int) -> int:
    """Memory traffic of an exchange, the collectives apart.

    Source: counted. Rows of one number are added up (2), scaled (2) and put together (2); of each worker they
    are added to the sum (3).
    """
    return rows_bytes(gradients) * (6 + 3 * workers) if workers > 1 else 0
