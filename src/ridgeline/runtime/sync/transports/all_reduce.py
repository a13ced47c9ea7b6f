"""The all-reduce of the backend: NCCL on GPUs, gloo on CPUs.

The sum never leaves the range of the mean: NCCL scales what it sums; over gloo the copy into the bucket does
(see `scaling`).
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.transports.scaling import UNSCALED, Scaling
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import OptionValue
from ridgeline.workers.world import World


class AllReduce(Transport):
    """One all-reduce a bucket, its flags behind it."""

    carries_flags = True
    blocks = False

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        self._scaling = UNSCALED if self.on_device else Scaling.over(self.size)
        self.scale = self._scaling.factor

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Sum over the workers, on GPUs divided by their number."""
        self.count(bucket.payload)
        if self.on_device:
            dist.all_reduce(bucket.flat, op=dist.ReduceOp.AVG, group=self.group)
            return None
        work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
        return work.get_future() if work else None

    def mean(self, values: Tensor) -> None:
        """Make `values` the mean; on a CPU, waits."""
        if self.on_device:
            dist.all_reduce(values, op=dist.ReduceOp.AVG, group=self.group)
            return
        values.mul_(self.scale)
        dist.all_reduce(values, group=self.group)
        self._scaling.take_back(values)

    def settle(self, bucket: Bucket) -> None:
        """Take back what the copies divided by too much."""
        self._scaling.take_back(bucket.flat)
