"""The names of buckets' frames, and the words for people: all that spells an entry."""

from collections.abc import Mapping, Sequence

from ridgeline.synchronisation.entries import Algorithm, Option
from ridgeline.synchronisation.holding import HELD, holds
from ridgeline.synchronisation.rhythm import rhythm_options
from ridgeline.synchronisation.sync import Sync
from ridgeline.synchronisation.tables import (
    ALGORITHMS,
    COMPRESSIONS,
    DEFAULT_ALGORITHM,
    UNCOMPRESSED,
)

GATHERING = "all_gather"
"""The frame, behind the optimizer, in which updated parts of the parameters are brought to all workers."""
SPARSE_ROWS = "sparse_rows"
"""The frame, behind the buckets, in which sparse gradients are exchanged by their rows."""


def frame_names(sync: Sync, num_buckets: int) -> tuple[str, ...]:
    """The frames in which the buckets are reduced, in launch order."""
    head = ALGORITHMS[sync.algorithm].frame
    return tuple(f"{head}/{number}" for number in range(num_buckets))


def algorithm_of(frame_name: str) -> Algorithm | None:
    """The (first) algorithm that has frames of this name; None for frames that reduce no bucket.

    For those who have a timeline and no plan.
    """
    head, _, number = frame_name.partition("/")
    # `isdigit` also holds for digits of other scripts, and `int` would read them.
    if not (number.isascii() and number.isdigit()):
        return None
    return next((entry for entry in ALGORITHMS.values() if entry.frame == head), None)


def is_bucket_frame(frame_name: str) -> bool:
    """Whether a bucket is reduced in a frame of this name."""
    return algorithm_of(frame_name) is not None


def bucket_of(frame_name: str) -> int | None:
    """The number of the bucket that is reduced in a frame; None for other frames."""
    return int(frame_name.rpartition("/")[2]) if is_bucket_frame(frame_name) else None


def is_exchange_frame(frame_name: str) -> bool:
    """Whether gradients or parameters are exchanged in a frame of this name."""
    return frame_name in (GATHERING, SPARSE_ROWS) or is_bucket_frame(frame_name)


def words_of(sync: Sync) -> dict[str, str]:
    """What a reader should see of how gradients are synchronised, buckets apart; the plainest is left out."""
    algorithm, compression = ALGORITHMS[sync.algorithm], COMPRESSIONS[sync.compression]
    set_ = {name: str(value) for name, value in sync.options.items()}
    words: dict[str, str] = {}
    if sync.algorithm != DEFAULT_ALGORITHM:
        words["algorithm"] = algorithm.label + _in_brackets(algorithm.options, set_)
    if sync.compression != UNCOMPRESSED:
        words["compression"] = (
            f"{compression.label} gradients{_in_brackets(compression.options, set_)}"
        )
    if holds(sync):
        words["held"] = f"{set_[HELD.name]} held"
    if sync.every > 1:
        words["interval"] = f"every {sync.every} steps{_in_brackets(rhythm_options(sync), set_)}"
    return words


def _in_brackets(options: Sequence[Option], values: Mapping[str, str]) -> str:
    """Those of the options that a plan sets, to stand after a label."""
    own = [f"{o.name} {values[o.name]}" for o in options if o.name in values]
    return f" ({', '.join(own)})" if own else ""
