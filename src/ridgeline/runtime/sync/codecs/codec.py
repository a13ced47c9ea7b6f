"""Codecs: how the workers share a payload by fewer bytes than it has.

A codec is one class and one entry in `synchronisation.COMPRESSIONS`: a `RowCodec` where encoding and decoding
say it all, a `Codec` where the exchange is one of its own. What surrounds it (error feedback, checkpoints,
new buckets) is done once, in `compressed` and `feedback`.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.synchronisation import ExchangeKind, OptionValue


class Exchange(NamedTuple):
    """What a codec may ask of the other workers; on a CPU each call waits, on a GPU it is enqueued.

    Attributes:
        kind: How the entry says that encoded payloads are exchanged.
        mean: Makes a dense tensor the mean over the workers, in place, by the plan's algorithm.
        gather: [n, ...] of what each of n workers has, by rank.
        scatter: Of [n, ...], row r of which goes to worker r: [n, ...] of what the workers have for this one.
        size: Number of workers.
        rank: This worker's place among them.
    """

    kind: ExchangeKind
    mean: Callable[[Tensor], None]
    gather: Callable[[Tensor], Tensor]
    scatter: Callable[[Tensor], Tensor]
    size: int
    rank: int


class Codec(abc.ABC):
    """Makes the mean of payloads over the workers by an exchange of its own.

    Shapes depend on shapes alone, nothing waits for a device, and everything can be captured in a CUDA
    graph: a codec that selects keeps exactly as many elements in every step.

    Args:
        options: The entry's options, all of them; see `synchronisation.values_of`.
    """

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        self.options = dict(options)

    @abc.abstractmethod
    def share(self, values: Tensor, mean: Tensor, exchange: Exchange, bucket: Bucket) -> None:
        """The exchange of a whole payload, in place: a copy of a bucket costs as much as a product.

        Args:
            values: float32 [elements], what is to be sent: the payload and what was left out before. Holds
                afterwards what this worker has not sent.
            mean: float32 [elements], gets the mean over the workers. It may be the bucket's payload, which is
                read before.
            exchange: What can be asked of others.
            bucket: Whose payload it is, with the names and shapes of its parameters.
        """

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Buckets were cut, for the first time or again."""
        return

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered from step to step besides what was left out, keyed by parameter; not copied."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember this instead, in the memory that is there."""
        return
