"""Transports that add up and divide by themselves, as the all-reduce of gloo does: scaled, then exact.

Each sum is divided by the worker that made it; see `scaling`.
"""

import abc
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.futures import Future

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.transports.scaling import Scaling
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import OptionValue
from ridgeline.workers.world import World


class SummingTransport(Transport):
    """A transport whose subclass adds scaled values up.

    Attributes:
        scaling: What is done before and after.
    """

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        self.scaling = Scaling.over(self.size)
        # On GPUs buckets are filled by one copy of many tensors, which does not scale.
        self.scale = 1.0 if self.on_device else self.scaling.factor
        self._scratch: dict[Any, Tensor] = {}

    @abc.abstractmethod
    def add_up(self, values: Tensor) -> None:
        """Make `values`, scaled already, the mean over the workers, in place."""

    def scratch_elements(self, num_elements: int) -> int:
        """Elements of memory that `add_up` needs beside so many."""
        return num_elements

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Make the payload the mean; on a CPU it is over when this returns."""
        self.count(bucket.payload)
        if self.on_device:
            bucket.payload.mul_(self.scaling.factor)
        self.add_up(bucket.payload)
        return None

    def mean(self, values: Tensor) -> None:
        """Make `values` the mean; on a CPU, waits."""
        self.add_up(values.mul_(self.scaling.factor))

    def arranged(self, buckets: tuple[Bucket, ...]) -> None:
        """Hold as much memory as the largest bucket of each type needs.

        Cost: Allocates it again, since captured graphs use the old one for the old buckets.
        """
        self._scratch = {}
        for bucket in sorted(buckets, key=lambda b: -b.payload.numel()):
            payload = bucket.payload
            if payload.dtype not in self._scratch:
                needed = self.scratch_elements(payload.numel())
                self._scratch[payload.dtype] = payload.new_empty(needed)

    def scratch(self, values: Tensor) -> Tensor:
        """Memory beside `values`, as many elements as `scratch_elements` says; what is in it is undefined."""
        needed = self.scratch_elements(values.numel())
        held = self._scratch.get(values.dtype)
        # What has no bucket comes here too: factors of a codec, and gradients that only some have as rows.
        if held is None or held.numel() < needed:
            return values.new_empty(needed)
        return held[:needed]
