"""Updates that servers make in the place of workers: how long pulls wait for them, and what workers do."""

from collections.abc import Sequence

from ridgeline.plan import Sync
from ridgeline.simulator.pricing.costs import Prices
from ridgeline.simulator.pricing.pieces import BucketCut, Piece, memory_piece
from ridgeline.synchronisation import serving_updates

VALUES_PIECE = "copy_values"
"""The name of the piece that brings updated values into the parameters."""


def update_seconds(
    sync: Sync, workers: int, optimizer: Sequence[Piece], cuts: Sequence[BucketCut]
) -> list[float]:
    """Seconds in which servers update the parameters of each bucket, for which its pull waits.

    Args:
        sync: Of a plan that has servers update.
        workers: Several; each has a core for the server beside it, as it has for its own update elsewhere.
        optimizer: What updating all parameters takes, calls included: a server makes those of its keys.
        cuts: The buckets. One has the part of the update that its bytes are of all.
    """
    total = sum(cut.num_bytes for cut in cuts)
    whole_s = sum(piece.lane_s for piece in optimizer) * serving_updates(sync, workers)
    return [whole_s * cut.num_bytes / total if total else 0.0 for cut in cuts]


def values_pieces(list_: Prices, cuts: Sequence[BucketCut]) -> tuple[Piece, ...]:
    """What is left of a worker's own update: each value read, and written into its parameter."""
    moved = 2 * sum(cut.num_bytes for cut in cuts)
    return (memory_piece(list_, VALUES_PIECE, "", moved),) if moved else ()
