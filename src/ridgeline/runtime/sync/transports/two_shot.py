"""Small buckets in one kernel: GPUs of one host read and write each other's memory.

Up to `one_shot_bytes` every GPU reads what all have and adds it up by itself (one shot); up to `most_bytes`
each adds up its share, and reads the others' (two shots); larger buckets are NCCL's all-reduce, whose
bandwidth is better. Between two GPUs one shot moves no more than two do, and waits once less. Kernels add in
the order of ranks, so a mean has the same bits on all workers and in every run.

Payloads are scaled on their way into symmetric memory, which is allocated once for the largest bucket of each
type, and the kernel writes sums where the payload was: two launches.

Source: torch.distributed._symmetric_memory; the limits are those of its `intra_node_comm.cu`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.errors import PlanError
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.transports.hosts import hosts_of
from ridgeline.runtime.sync.transports.shared_memory import INSTEAD, check_one_host, share
from ridgeline.runtime.sync.transports.summing import SummingTransport
from ridgeline.synchronisation import OptionValue
from ridgeline.workers.world import World

DTYPES = (torch.float32, torch.bfloat16)
"""Of the kernels."""
ALIGNED = 16
"""Bytes at a time that the kernels load at best."""
_KERNELS = ("one_shot_all_reduce_out", "two_shot_all_reduce_out")
_PAIR = 2
"""GPUs between which one shot moves as many bytes as two."""
_WHOSE = "sync.algorithm='two_shot'"


class TwoShot(SummingTransport):
    """All-reduce by kernels on symmetric memory, for what is small enough.

    Raises:
        PlanError: this torch has no such kernels, the workers are on several hosts, or a bucket is of another
            type than float32 or bfloat16.

    Cost: Memory for the largest bucket of each type, shared between the GPUs by a rendezvous of all workers
        when buckets are cut.
    """

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        check_offered(_missing_kernels(), hosts_of(world))
        self._one_shot_bytes = int(self.options["one_shot_bytes"])
        self._most_bytes = int(self.options["most_bytes"])
        self._shared: dict[torch.dtype, Tensor] = {}

    def arranged(self, buckets: tuple[Bucket, ...]) -> None:
        """Share memory for the largest bucket that is small enough, of each type.

        What is there already stays where it suffices: a graph that was captured reads it, and buckets that
        leave kept gradients are cut anew by one worker alone, which would wait for the others here.
        """
        largest: dict[torch.dtype, int] = {}
        for bucket in buckets:
            check_dtype(bucket.payload.dtype)
            if bucket.payload.nbytes <= self._most_bytes:
                known = largest.get(bucket.payload.dtype, 0)
                largest[bucket.payload.dtype] = max(known, bucket.payload.numel())
        # All workers cut the same buckets, so they come to each rendezvous in the same order.
        for dtype, num_elements in largest.items():
            needed = _aligned(num_elements, dtype)
            known = self._shared.get(dtype)
            if needed > (0 if known is None else known.numel()):
                self._shared[dtype] = share(needed, dtype, group=self.group, whose=_WHOSE).own

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Make the payload the mean.

        Cost: Enqueues two kernels; two more where the payload is no multiple of `ALIGNED` bytes.
        """
        self.count(bucket.payload)
        self._add_up(bucket.payload, self.scaling.factor)
        return None

    def add_up(self, values: Tensor) -> None:
        """Make `values`, scaled already, the mean over the workers, in place."""
        self._add_up(values, 1.0)

    def _add_up(self, values: Tensor, factor: float) -> None:
        """By one of the two kernels; or by NCCL, where too much or nothing is shared."""
        num_elements = values.numel()
        needed = _aligned(num_elements, values.dtype)
        shared = self._shared.get(values.dtype)
        if shared is None or shared.numel() < needed or values.nbytes > self._most_bytes:
            # Sizes and types are the same on all workers, so all of them choose NCCL here or none does.
            dist.all_reduce(values.mul_(factor), group=self.group)
        elif num_elements:
            shared = shared[:needed]
            torch.mul(values, factor, out=shared[:num_elements])
            if needed == num_elements and values.data_ptr() % ALIGNED == 0:
                self._sum_up(shared, values)
            else:
                # The kernels want the same number of elements on both sides, and aligned memory: where
                # `values` has fewer, or begins in between, sums need room of their own.
                sums = torch.empty_like(shared)
                self._sum_up(shared, sums)
                values.copy_(sums[:num_elements])
        self.scaling.take_back(values)

    def _sum_up(self, shared: Tensor, sums: Tensor) -> None:
        name, kernels = self.group.group_name, torch.ops.symm_mem
        if self.size == _PAIR or shared.nbytes <= self._one_shot_bytes:
            kernels.one_shot_all_reduce_out(shared, "sum", name, sums)
        else:
            kernels.two_shot_all_reduce_out(shared, "sum", name, sums)

    def close(self) -> None:
        """Give the shared memory back."""
        self._shared = {}


def check_offered(missing: tuple[str, ...], hosts: list[list[int]]) -> None:
    """See that this torch has the kernels, and that the workers share a host.

    Raises:
        PlanError: it has not, or they do not.
    """
    if missing:
        raise PlanError(
            f"wanted a torch with kernels on symmetric memory for {_WHOSE}, got "
            f"{torch.__version__} without {', '.join(missing)}; {INSTEAD}"
        )
    check_one_host(hosts, _WHOSE)


def check_dtype(dtype: torch.dtype) -> None:
    """See that the kernels know a type.

    Raises:
        PlanError: they do not.
    """
    if dtype not in DTYPES:
        raise PlanError(
            f"wanted parameters of float32 or bfloat16 for {_WHOSE}, got "
            f"{str(dtype).removeprefix('torch.')}; {INSTEAD}"
        )


def _missing_kernels() -> tuple[str, ...]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - torch asks in no other way
    return tuple(
        name
        for name in _KERNELS
        if not hasattr(torch.ops.symm_mem, name) or not has(f"symm_mem::{name}", "CUDA")
    )


def _aligned(num_elements: int, dtype: torch.dtype) -> int:
    step = ALIGNED // dtype.itemsize
    return -(-num_elements // step) * step
