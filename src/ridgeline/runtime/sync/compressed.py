"""A transport that sends what a codec makes of the payload.

Three exchanges, by what encoded payloads allow (`Compression.exchange`):

    sum      they can be added up: the plan's algorithm makes their mean
    scatter  each worker gets its share of every payload, adds up in single precision, encodes the mean, and
             all gather the shares: what is sent does not grow with the number of workers
    gather   every worker gets all payloads and decodes each

Source of `scatter`: Wang et al., "ZeRO++", 2023 (quantised gradients by all-to-all).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn import functional

from ridgeline.runtime.sync.buckets import Bucket
from ridgeline.runtime.sync.calls import all_gather, all_to_all
from ridgeline.runtime.sync.codec import Codec, Exchange
from ridgeline.runtime.sync.feedback import ErrorFeedback
from ridgeline.runtime.sync.transport import Transport
from ridgeline.synchronisation import Compression


class Compressed(Transport):
    """Encodes, exchanges and decodes buckets, with error feedback where the entry has state.

    Args:
        algorithm: Adds up what can be added up.
        codec: Encodes and decodes.
        entry: Says how payloads are exchanged, and whether what was left out is remembered.
    """

    def __init__(self, algorithm: Transport, codec: Codec, entry: Compression) -> None:
        super().__init__(algorithm.world, algorithm.options)
        self._algorithm, self._codec, self._entry = algorithm, codec, entry
        self._feedback = ErrorFeedback() if entry.has_state else None
        self._exchange = Exchange(
            self._counted_mean, self._gather, self._scatter, self.size, self.rank
        )

    def mean(self, values: Tensor) -> None:
        """The mean of values that no codec touches."""
        self._algorithm.mean(values)

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Make the payload the mean of what the codec leaves of it."""
        feedback = self._feedback
        values = bucket.payload.float() if feedback is None else feedback.added(bucket)
        shared = self._codec.share(values, self._exchange, bucket)
        mean, sent = shared or getattr(self, f"_by_{self._entry.exchange}")(values)
        bucket.payload.copy_(mean)
        if feedback is not None:
            if bucket.payload.dtype != mean.dtype:
                # What rounding the mean lost is the same on all workers, and each makes up for it.
                sent = sent - (mean - bucket.payload.float())
            feedback.keep(bucket, values, sent)
        return None

    def arranged(self, buckets: tuple[Bucket, ...]) -> None:
        """Keep what was left out of each parameter, wherever it lies now."""
        self._codec.arranged(buckets)
        self._algorithm.arranged(buckets)
        if self._feedback is not None:
            self._feedback.arranged(buckets)

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

    def _by_sum(self, values: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._codec.encode(values[None])
        sent = self._codec.decode(parts, values.numel())[0]
        if self._feedback is not None:
            sent = sent.clone()  # the parts become the mean
        for part in parts:
            self._counted_mean(part.view(-1))
        return self._codec.decode(parts, values.numel())[0], sent

    def _by_gather(self, values: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._codec.encode(values[None])
        gathered = tuple(self._gather(part).flatten(0, 1) for part in parts)
        total, sent = torch.zeros_like(values), values
        for rank in range(
            self.size
        ):  # one by one: all at once would take the memory of as many buckets
            row = self._codec.decode(tuple(p[rank : rank + 1] for p in gathered), values.numel())[0]
            total += row
            sent = row if rank == self.rank else sent
        return total.div_(self.size), sent

    def _by_scatter(self, values: Tensor) -> tuple[Tensor, Tensor]:
        share = self._codec.share_elements(values.numel(), self.size)
        rows = functional.pad(values, (0, self.size * share - values.numel()))
        parts = self._codec.encode(rows.view(self.size, share))
        sent = self._codec.decode(parts, share)
        mine = self._codec.decode(tuple(map(self._scatter, parts)), share).mean(0)
        told = self._codec.encode(mine[None])
        heard = tuple(self._gather(part).flatten(0, 1) for part in told)
        mean = self._codec.decode(heard, share)
        # What rounding the mean of its share lost, its owner makes up for: for all workers at once.
        sent[self.rank] -= self.size * (mine - mean[self.rank])
        return mean.view(-1)[: values.numel()], sent.view(-1)[: values.numel()]

    def _counted_mean(self, values: Tensor) -> None:
        self.count(values)
        self._algorithm.mean(values)

    def _gather(self, part: Tensor) -> Tensor:
        self.count(part)
        return all_gather(part, self.group, self.size)

    def _scatter(self, rows: Tensor) -> Tensor:
        self.count(rows)
        return all_to_all(rows, self.group)
