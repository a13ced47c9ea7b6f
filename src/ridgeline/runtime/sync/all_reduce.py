"""The all-reduce of the backend: NCCL on GPUs, gloo on CPUs.

The mean is the sum rounded once more, and the sum never leaves the range of the mean: NCCL scales what it
sums; over gloo the copy divides by the power of two that is no less than the number of workers, which is
exact, and what that is too much is taken back by one division of the sum.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.runtime.sync.buckets import Bucket
from ridgeline.runtime.sync.transport import Transport
from ridgeline.runtime.world import World
from ridgeline.synchronisation import OptionValue


class AllReduce(Transport):
    """One all-reduce a bucket, its flags behind it."""

    carries_flags = True
    blocks = False

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        self.scale = 1.0 if self.on_device else power_of_two_mean(self.size)
        self._excess = self.size * self.scale if not self.on_device else 1.0

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
        if self._excess != 1.0:
            values.div_(self._excess)

    def settle(self, bucket: Bucket) -> None:
        """Take back what the copies divided by too much."""
        if self._excess != 1.0:
            bucket.flat.div_(self._excess)


def power_of_two_mean(size: int) -> float:
    """The power of two by which values are divided before a sum over so many workers; exact."""
    return 0.5 ** (size - 1).bit_length()
