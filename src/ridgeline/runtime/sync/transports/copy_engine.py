"""Large buckets by copy engines: GPUs of one host fetch each other's shares while their kernels continue.

A kernel that sends occupies multiprocessors, and a matrix product that was cut for all of them then takes
two turns where it took one. So the bytes are moved by copies, which copy engines carry out:

    all are there | fetch my share of each | add up | all are there | fetch the others' means | all have them

Barriers are kernels of one warp. A share is added up by one GPU alone, in an order that follows from its
rank, so a mean has the same bits on all workers and in every run. Buckets lie in memory that the GPUs share;
beside it is room for the shares that are fetched. Copies move (n - 1)/n of a bucket twice, as a ring does.

What is smaller than `least_bytes`, or moved in memory, is NCCL's all-reduce, whose start costs less.

Source: reduce-scatter, then all-gather: Patarasuk, Yuan, JPDC 69(2), 2009.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.transports.hosts import hosts_of
from ridgeline.runtime.sync.transports.scaling import Scaling
from ridgeline.runtime.sync.transports.shared_memory import SharedMemory, check_one_host, share
from ridgeline.runtime.sync.transports.summing import SummingTransport
from ridgeline.synchronisation import OptionValue
from ridgeline.workers.world import World

_WHOSE = "sync.algorithm='copy_engine'"
_ALIGNED = 128
"""Bytes to whose multiples shares are cut, so that copies are of whole lines."""


class CopyPeers(NamedTuple):
    """What one worker reaches: a tensor of each, by rank, room for fetched shares, and a barrier of all."""

    rank: int
    shared: Sequence[Tensor]
    fetched: Tensor
    barrier: Callable[[], None]


class CopyEngine(SummingTransport):
    """All-reduce by copies between GPUs of one host.

    Raises:
        PlanError: the workers are on several hosts, or share no memory.

    Cost: A rendezvous of all workers for each bucket, when they are cut; beside the buckets, memory for the
        largest one of each type.
    """

    shares_memory = True

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        check_one_host(hosts_of(world), _WHOSE)
        self._least_bytes = int(self.options["least_bytes"])
        self._memories: dict[int, SharedMemory] = {}
        self._peers: dict[int, CopyPeers] = {}

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Shared memory, where a bucket is large enough; all workers ask together.

        Raises:
            PlanError: these GPUs share no memory.
        """
        if num_elements * dtype.itemsize < self._least_bytes:
            return super().allocate(num_elements, dtype, device)
        memory = share(num_elements, dtype, group=self.group, whose=_WHOSE)
        self._memories[memory.own.data_ptr()] = memory
        return memory.own

    def arranged(self, buckets: tuple[Bucket, ...]) -> None:
        """Keep what these buckets lie in, and room for the shares of the largest of each type."""
        places = {bucket.payload.data_ptr(): bucket.payload for bucket in buckets}
        # Memory of buckets that were cut before goes once no gradient is a view of it any more.
        self._memories = {at: one for at, one in self._memories.items() if at in places}
        shared = sorted((places[at] for at in self._memories), key=Tensor.numel, reverse=True)
        room: dict[torch.dtype, Tensor] = {}
        for payload in shared:
            length = share_elements(payload.numel(), payload.element_size(), self.size)
            room.setdefault(payload.dtype, payload.new_empty((self.size - 1) * length))
        self._peers = {
            at: self._reach(memory, places[at], room[places[at].dtype])
            for at, memory in self._memories.items()
        }

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Make the payload the mean.

        Cost: See `average_by_copies`; or one all-reduce of NCCL.
        """
        self.count(bucket.payload)
        peers = self._peers.get(bucket.payload.data_ptr())
        if peers is None:
            self.mean(bucket.payload)
        else:
            average_by_copies(peers, self.scaling)
        return None

    def add_up(self, values: Tensor) -> None:
        """Make `values`, scaled already, the mean over the workers, in place, by NCCL."""
        dist.all_reduce(values, group=self.group)
        self.scaling.take_back(values)

    def close(self) -> None:
        """Give the shared memory back, once nothing else holds it."""
        self._memories.clear()
        self._peers.clear()

    def _reach(self, memory: SharedMemory, payload: Tensor, room: Tensor) -> CopyPeers:
        shared = [
            payload if rank == self.rank else memory.of(rank, payload) for rank in range(self.size)
        ]
        return CopyPeers(self.rank, shared, room, memory.handle.barrier)


def share_elements(num_elements: int, element_bytes: int, size: int) -> int:
    """Elements of each worker's share; the last ones may have fewer, or none."""
    step = max(1, _ALIGNED // element_bytes)
    return -(-num_elements // (size * step)) * step


def average_by_copies(peers: CopyPeers, scaling: Scaling) -> None:
    """Make what a worker shares the mean over all, in place; all call it together.

    Values are scaled before they are added up (see `scaling`), each by the addition itself.

    Args:
        peers: What this worker reaches; all tensors are flat and as long.
        scaling: Over as many workers.

    Cost: Enqueues two copies for every other worker, one kernel for each worker, and three barriers.
    """
    rank, size = peers.rank, len(peers.shared)
    own = peers.shared[rank]
    length = share_elements(own.numel(), own.element_size(), size)
    bounds = [min(r * length, own.numel()) for r in range(size + 1)]
    shares = [slice(*bounds[r : r + 2]) for r in range(size)]
    mine = own[shares[rank]]
    # From the next one on, so that not all fetch from the same worker.
    others = [(rank + step) % size for step in range(1, size)]
    peers.barrier()
    fetched = peers.fetched[: (size - 1) * len(mine)].view(size - 1, len(mine))
    for place, other in enumerate(others):
        fetched[place].copy_(peers.shared[other][shares[rank]])
    # Before the first addition: sums of values that were not scaled could leave the range of the type.
    mine.mul_(scaling.factor)
    for one in fetched:
        mine.add_(one, alpha=scaling.factor)
    scaling.take_back(mine)
    peers.barrier()
    for other in others:
        own[shares[other]].copy_(peers.shared[other][shares[other]])
    peers.barrier()  # none writes before all have read
