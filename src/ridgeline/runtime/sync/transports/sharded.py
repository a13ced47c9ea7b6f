"""Half an all-reduce: each worker gets the mean of its part of a bucket, and later all get all parts.

In between each worker updates the parameters of its part (see `sharded_update`), so that the other half
brings parameters to all instead of gradients. Over NCCL these are its reduce-scatter and its all-gather.
Over gloo they are the two laps of the ring: gloo has no reduce-scatter that sends less than an all-reduce.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020,
stage 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.transports.ring import (
    Cut,
    Lap,
    Move,
    Ring,
    adding_moves,
    gathering_moves,
    neighbours,
    ring_moves,
    run_laps,
)
from ridgeline.synchronisation import OptionValue
from ridgeline.workers import flat_collectives
from ridgeline.workers.world import World

_PIECES = 1
"""A part is sent as one message: cut into pieces, parts would not be equal."""


class Sharded(Ring):
    """The mean of its own part for every worker, or while parts are not settled yet of all of them.

    Attributes:
        has_settled: Whether buckets stay as they are cut, so that a worker needs the mean of its part alone.
    """

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, {**options, "pieces": _PIECES})
        self.has_settled = False

    def own_shard(self, whole: Tensor) -> Tensor:
        """This worker's part of a tensor that is laid out like a payload."""
        # Not -1, of which nothing follows where there are no elements.
        return whole.view(self.size, whole.numel() // self.size)[self.rank]

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Make this worker's part the mean; what is elsewhere is undefined then, once parts are settled."""
        if not self.has_settled and self.on_device:
            return super().reduce(bucket)
        self.count(bucket.payload)
        if not self.has_settled:
            # In the order in which parts are added up: a run that continues begins with a step like this one.
            self._run(bucket.payload, ring_moves(*self._ring(bucket.payload)))
        elif self.on_device:
            part = self.own_shard(bucket.payload)
            average = dist.ReduceOp.AVG
            flat_collectives.reduce_scatter(part, bucket.payload, self.group, average)
        else:
            self._run(bucket.payload, adding_moves(*self._ring(bucket.payload)))
        return None

    def gather(self, whole: Tensor) -> None:
        """Fill a tensor that is laid out like a payload with the parts of all workers, each of its own.

        Cost: On a CPU, blocks until they are there; on a GPU, enqueues.
        """
        part = self.own_shard(whole)
        self.count(part)
        if self.on_device:
            data = whole.view(torch.uint8)
            flat_collectives.all_gather(data, self.own_shard(data), self.group)
        else:
            self._run(whole, gathering_moves(*self._ring(whole)))

    def _ring(self, whole: Tensor) -> tuple[Cut, int, int]:
        """How a payload is cut, and where this worker stands so that it gets the sum of its own part."""
        part = whole.numel() // self.size
        return Cut(whole.numel(), part, part, _PIECES), (self.rank - 1) % self.size, self.size

    def _run(self, whole: Tensor, moves: Sequence[Move]) -> None:
        lap = Lap(whole, self.scratch(whole), moves, *neighbours(range(self.size), self.rank))
        run_laps((lap,), _PIECES, self.scaling, self._messages)
