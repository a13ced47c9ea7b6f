"""Transports: how the payload of a bucket becomes the mean over the workers.

A transport is one subclass of `Transport` and one entry in `synchronisation.ALGORITHMS`; its shape is that of
a communication hook of torch's DistributedDataParallel: given a bucket it starts the exchange and returns a
future. Scaling and mean are its own affair. What surrounds it (when buckets leave, frames, flags, codecs,
error feedback, checkpoints) knows no transport by name.
"""

import abc
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.futures import Future

from ridgeline.runtime.sync.buckets.buckets import Bucket, zeros
from ridgeline.synchronisation import OptionValue
from ridgeline.workers.world import World


class Transport(abc.ABC):
    """Makes the mean of buckets over the workers along the data axis.

    All workers make the same calls in the same order. On a GPU a call enqueues on the current stream and must
    be capturable in a CUDA graph: no waiting, fixed shapes, memory that stays where it is.

    Args:
        world: This worker's place; size at least 2.
        options: The entry's options, all of them; see `synchronisation.values_of`.

    Attributes:
        scale: What gradients are multiplied by when they are copied into a bucket: 1, or a power of two by
            which the sum does not overflow.
        sent_bytes: Payload that this worker has handed over so far, flags apart; replays of a graph count
            nothing.
    """

    carries_flags: ClassVar[bool] = False
    """Whether `reduce` sums `bucket.behind` as well; otherwise the reducer does, in one collective a step."""
    shares_memory: ClassVar[bool] = False
    """Whether buckets lie in memory that other workers read: all ask for it together."""
    blocks: bool = True
    """Whether `reduce` returns on a CPU when the exchange is over; it then runs in a thread of its own."""

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        self.world = world
        self.options = dict(options)
        self.on_device = world.device.type == "cuda"
        self.group = world.group("data")
        self.size = world.axis_size("data")
        self.rank = world.axis_rank("data")
        self.scale = 1.0
        self.sent_bytes = 0

    @abc.abstractmethod
    def mean(self, values: Tensor) -> None:
        """Make `values`, one-dimensional and dense, the mean over the workers, in place.

        On a CPU it is over when this returns, on a GPU it is enqueued.
        """

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Start making `bucket.payload` the mean over the workers.

        Returns:
            On the CPU a future that is done when the exchange is; None where it is over, or enqueued.
        """
        self.count(bucket.payload)
        self.mean(bucket.payload)
        return None

    def count(self, *payloads: Tensor) -> None:
        """Note what is handed over."""
        self.sent_bytes += sum(payload.nbytes for payload in payloads)

    def settle(self, bucket: Bucket) -> None:
        """What is left to compute once the exchange is over, in the thread and stream of the step."""
        return

    def dropped(self, bucket: Bucket, positions: Collection[int]) -> None:
        """No worker had a gradient at some positions of a bucket: the means of these are not used.

        Called once flags have told, where this worker lacked a gradient of the bucket.
        """
        return

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of zeros for a bucket; all workers ask for the same ones in the same order."""
        return zeros(num_elements, dtype, device)

    def arranged(self, buckets: tuple[Bucket, ...]) -> None:
        """Buckets were cut, for the first time or again; nothing is under way."""
        return

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered from step to step, by names that do not depend on buckets; not copied."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember this instead, in the memory that is there; names that are missing begin at zero."""
        return

    def close(self) -> None:
        """Release what is held."""
        return
