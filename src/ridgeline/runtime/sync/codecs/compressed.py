"""A transport that sends what a codec makes of the payload."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Codec, Exchange
from ridgeline.runtime.sync.codecs.feedback import ErrorFeedback
from ridgeline.runtime.sync.collectives import all_gather, all_to_all
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import Compression


class Compressed(Transport):
    """Has a codec share buckets, with error feedback where the entry has state.

    Args:
        algorithm: Adds up what can be added up.
        codec: Makes the mean of a payload.
        entry: Says how payloads are exchanged, and whether what was left out is remembered.
    """

    def __init__(self, algorithm: Transport, codec: Codec, entry: Compression) -> None:
        super().__init__(algorithm.world, algorithm.options)
        self._algorithm, self._codec = algorithm, codec
        self._feedback = ErrorFeedback() if entry.has_state else None
        self._exchange = Exchange(
            entry.exchange_among(self.size),
            self._counted_mean,
            self._gather,
            self._scatter,
            self.size,
            self.rank,
        )

    def mean(self, values: Tensor) -> None:
        """The mean of values that no codec touches."""
        self._algorithm.mean(values)

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Make the payload the mean of what the codec leaves of it."""
        # A parameter without elements may have a bucket by itself, which no collective takes.
        if bucket.payload.numel():
            share(bucket, self._codec, self._exchange, self._feedback)
        return None

    def arranged(self, buckets: tuple[Bucket, ...]) -> None:
        """Keep what was left out of each parameter, wherever it lies now."""
        self._codec.arranged(buckets)
        self._algorithm.arranged(buckets)
        if self._feedback is not None:
            self._feedback.arranged(buckets)

    def dropped(self, bucket: Bucket, positions: Collection[int]) -> None:
        """What was left out of these before is left out still."""
        if self._feedback is not None:
            self._feedback.put_back(bucket, positions)

    def state_dict(self) -> dict[str, Tensor]:
        """What was left out, and what the codec and the algorithm remember."""
        feedback = {} if self._feedback is None else self._feedback.state_dict()
        return {**self._algorithm.state_dict(), **self._codec.state_dict(), **feedback}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember this instead."""
        self._algorithm.load_state_dict(state)
        self._codec.load_state_dict(state)
        if self._feedback is not None:
            self._feedback.load_state_dict(state)

    def close(self) -> None:
        """Release what is held."""
        self._algorithm.close()

    def _counted_mean(self, values: Tensor) -> None:
        self.count(values)
        self._algorithm.mean(values)

    def _gather(self, part: Tensor) -> Tensor:
        self.count(part)
        return all_gather(part, self.group, self.size)

    def _scatter(self, rows: Tensor) -> Tensor:
        self.count(rows)
        return all_to_all(rows, self.group)


def share(bucket: Bucket, codec: Codec, exchange: Exchange, feedback: ErrorFeedback | None) -> None:
    """Make the payload of a bucket the mean of what the codec leaves of it.

    Args:
        bucket: Holds the payload.
        codec: Knows the bucket already.
        exchange: Reaches the other workers.
        feedback: What was left out before, and is of this payload; None where that is not remembered.
    """
    payload = bucket.payload
    values = payload.to(torch.float32, copy=True) if feedback is None else feedback.added(bucket)
    is_narrow = payload.dtype != torch.float32
    mean = torch.zeros_like(values) if is_narrow else payload
    codec.share(values, mean, exchange, bucket)
    if is_narrow:
        payload.copy_(mean)
        # What rounding the mean lost is the same on all workers, and each makes up for it.
        values.add_(mean).sub_(payload.float())
    if feedback is not None:
        feedback.keep(bucket)
