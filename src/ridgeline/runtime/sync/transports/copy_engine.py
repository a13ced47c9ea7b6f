"""Large buckets by copy engines: GPUs of one host fetch each other's shares while their kernels go on.

A kernel that sends occupies multiprocessors, and a matrix product that was cut for all of them then takes
two turns where it took one. So the bytes are moved by copies, which copy engines carry out:

    scale into shared memory, all are there, fetch my share of each, add up, all are there, fetch all means

Barriers are kernels of one warp; the sum is one kernel over a share of each worker. A share is added up by
one GPU alone, so a mean has the same bits on all workers. Buckets below `least_bytes` are NCCL's all-reduce,
whose start costs less.

Shared memory is allocated for the largest bucket of each type, and beside it room for the shares that are
fetched. Copies move (n - 1)/n of a bucket twice, as a ring does.

Source: reduce-scatter, then all-gather: Patarasuk, Yuan, JPDC 69(2), 2009.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.runtime.sync.buckets import Bucket
from ridgeline.runtime.sync.transports.hosts import hosts_of
from ridgeline.runtime.sync.transports.shared_memory import check_one_host, share
from ridgeline.runtime.sync.transports.summing import SummingTransport
from ridgeline.runtime.world import World
from ridgeline.synchronisation import OptionValue

_NAME = "copy_engine"
_ALIGNED = 128
"""Bytes to whose multiples shares are cut, so that copies are of whole lines."""


class Peers(NamedTuple):
    """What one worker reaches: the shared memory of all, by rank, room beside it, and a barrier of all."""

    rank: int
    shared: Sequence[Tensor]
    fetched: Tensor
    barrier: Callable[[], None]


class CopyEngine(SummingTransport):
    """All-reduce by copies between GPUs of one host.

    Raises:
        PlanError: the workers are on several hosts, or share no memory.

    Cost: Memory for the largest bucket of each type, shared by a rendezvous of all workers when buckets are
        cut, and as much beside it.
    """

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        check_one_host(hosts_of(world), _NAME)
        self._least_bytes = int(self.options["least_bytes"])
        self._peers: dict[torch.dtype, Peers] = {}

    def arranged(self, buckets: tuple[Bucket, ...]) -> None:
        """Share memory for the largest bucket of each type that is not left to NCCL."""
        self._peers = {}
        largest: dict[torch.dtype, int] = {}
        for payload in (bucket.payload for bucket in buckets):
            if _num_bytes(payload) >= self._least_bytes:
                known = largest.get(payload.dtype, 0)
                largest[payload.dtype] = max(known, payload.numel())
        # All workers cut the same buckets, so they come to each rendezvous in the same order.
        for dtype, num_elements in largest.items():
            if num_elements:
                self._peers[dtype] = self._reach(num_elements, dtype)

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Make the payload the mean.

        Cost: See `sum_by_copies`.
        """
        self.count(bucket.payload)
        self._add_up(bucket.payload, self.scaling.factor)
        return None

    def add_up(self, values: Tensor) -> None:
        """Make `values`, scaled already, the mean over the workers, in place."""
        self._add_up(values, 1.0)

    def _add_up(self, values: Tensor, factor: float) -> None:
        """By copies; or by NCCL, where that is faster or too little is shared."""
        peers = self._peers.get(values.dtype)
        if (
            peers is None
            or values.numel() > peers.shared[0].numel()
            or _num_bytes(values) < self._least_bytes
        ):
            dist.all_reduce(values.mul_(factor), group=self.group)
        else:
            sum_by_copies(values, peers, factor)
        self.scaling.take_back(values)

    def close(self) -> None:
        """Give the shared memory back."""
        self._peers = {}

    def _reach(self, num_elements: int, dtype: torch.dtype) -> Peers:
        memory = share(num_elements, dtype, group=self.group, algorithm=_NAME)
        shared = [
            memory.own if rank == self.rank else _of_peer(memory.handle, rank, num_elements, dtype)
            for rank in range(self.size)
        ]
        length = share_elements(num_elements, dtype.itemsize, self.size)
        fetched = memory.own.new_empty(self.size, length)
        return Peers(self.rank, shared, fetched, memory.handle.barrier)


def share_elements(num_elements: int, element_bytes: int, size: int) -> int:
    """Elements of each worker's share; the last ones may have fewer, or none."""
    step = max(1, _ALIGNED // element_bytes)
    return -(-num_elements // (size * step)) * step


def sum_by_copies(values: Tensor, peers: Peers, factor: float) -> None:
    """Scale and add up over the workers, in place; all call it together.

    Args:
        values: Flat; no more elements than are shared.
        peers: What this worker reaches.
        factor: What values are multiplied by before they are added up.

    Cost: Enqueues two copies for each worker, three barriers and two kernels.
    """
    rank, size, num_elements = peers.rank, len(peers.shared), values.numel()
    length = share_elements(num_elements, values.element_size(), size)
    bounds = [min(r * length, num_elements) for r in range(size + 1)]
    shares = [slice(*bounds[r : r + 2]) for r in range(size)]
    # Each begins with itself and goes on with the next one, so that not all fetch from the same worker.
    order = [(rank + step) % size for step in range(size)]
    mine = peers.shared[rank][shares[rank]]
    torch.mul(values, factor, out=peers.shared[rank][:num_elements])
    peers.barrier()
    if len(mine):
        fetched = peers.fetched.view(-1)[: size * len(mine)].view(size, -1)
        for other in order:
            fetched[other].copy_(peers.shared[other][shares[rank]])
        torch.sum(fetched, 0, out=mine)
    peers.barrier()
    for other in order:
        values[shares[other]].copy_(peers.shared[other][shares[other]])
    peers.barrier()  # nobody writes there before all have read


def _of_peer(handle: Any, rank: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    found: Tensor = handle.get_buffer(rank, (num_elements,), dtype)
    return found


def _num_bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()
