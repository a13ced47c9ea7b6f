"""Codecs: how a payload becomes smaller, and what comes out of it again.

A codec is one subclass of `Codec` and one entry in `synchronisation.COMPRESSIONS`. What surrounds it (the
exchange, error feedback, checkpoints, new buckets) is done once, in `compressed` and `feedback`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ridgeline.runtime.sync.buckets import Bucket
from ridgeline.synchronisation import OptionValue, share_elements

Parts = tuple[Tensor, ...]
"""A payload encoded: tensors of fixed shapes, of which the first dimension is that of the rows."""


class Exchange(NamedTuple):
    """What a codec may ask of the other workers; on a CPU each call waits, on a GPU it is enqueued.

    Attributes:
        mean: Makes a dense tensor the mean over the workers, in place, by the plan's algorithm.
        gather: [n, ...] of what each of n workers has, by rank.
        scatter: Of [n, ...], row r of which goes to worker r: [n, ...] of what the workers have for this one.
        size: Number of workers.
        rank: This worker's place among them.
    """

    mean: Callable[[Tensor], None]
    gather: Callable[[Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]
    size: int
    rank: int


class Codec:
    """Encodes rows of numbers into fewer bytes, and back: by `encode` and `decode`, or by `share` alone.

    Shapes depend on shapes alone, nothing waits for a device, and everything can be captured in a CUDA
    graph: a codec that selects keeps exactly as many elements in every step.

    Args:
        options: The entry's options, all of them; see `synchronisation.values_of`.
    """

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        self.options = dict(options)

    def encode(self, rows: Tensor) -> Parts:
        """What is sent instead of `rows`, float32 [rows, elements]; each row can be decoded by itself."""
        raise NotImplementedError(f"{type(self).__name__} has neither encode nor share")

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        """What the other side makes of it: float32 [rows, elements]."""
        raise NotImplementedError(f"{type(self).__name__} has neither decode nor share")

    def share_elements(self, num_elements: int, workers: int) -> int:
        """Elements of each of the equal shares into which a payload is scattered; the last is filled up."""
        return share_elements(num_elements, workers)

    def share(
        self, values: Tensor, exchange: Exchange, bucket: Bucket
    ) -> tuple[Tensor, Tensor] | None:
        """The exchange of a whole payload, for codecs that have one of their own.

        Args:
            values: float32 [elements], what is to be sent: the payload and what was left out before.
            exchange: What can be asked of others.
            bucket: Whose payload it is, with the names and shapes of its parameters.

        Returns:
            The mean over the workers, and what of `values` this worker has contributed to it, or None for
            the exchange that the entry names.
        """
        return None

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Buckets were cut, for the first time or again."""
        return

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered from step to step besides what was left out, keyed by parameter; not copied."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember this instead, in the memory that is there."""
        return
