"""Small buckets in one kernel: GPUs of one host read and write each other's memory.

Up to `one_shot_bytes` every GPU reads what all have and adds it up by itself (one shot); up to `most_bytes`
each adds up its share and writes it to all (two shots); larger buckets are NCCL's all-reduce, whose bandwidth
is better. Kernels add in the order of ranks, so a mean has the same bits on all workers and in every run.

Payloads are copied into symmetric memory, allocated once for the largest bucket of each type, and divided on
their way out. NVLink multicast is left off.

Source: torch.distributed._symmetric_memory; the limits are those of its `intra_node_comm.cu`.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import PlanError
from ridgeline.runtime.sync.buckets import Bucket
from ridgeline.runtime.sync.transports.hosts import hosts_of
from ridgeline.runtime.sync.transports.summing import SummingTransport
from ridgeline.runtime.world import World
from ridgeline.synchronisation import OptionValue

DTYPES = (torch.float32, torch.bfloat16)
"""Of the kernels."""
ALIGNED = 16
"""Bytes at a time that the kernels load at best."""
_KERNELS = ("one_shot_all_reduce_out", "two_shot_all_reduce_")
_INSTEAD = "use sync.algorithm='all_reduce'"


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
        """Share memory for the largest bucket that is small enough, of each type."""
        self._shared = {}
        largest: dict[torch.dtype, int] = {}
        for bucket in buckets:
            check_dtype(bucket.payload.dtype)
            if _num_bytes(bucket.payload) <= self._most_bytes:
                known = largest.get(bucket.payload.dtype, 0)
                largest[bucket.payload.dtype] = max(known, bucket.payload.numel())
        # All workers cut the same buckets, so they come to each rendezvous in the same order.
        for dtype, num_elements in largest.items():
            if num_elements:
                self._shared[dtype] = self._rendezvous(_aligned(num_elements, dtype), dtype)

    def add_up(self, values: Tensor) -> None:
        """By one of the two kernels; or by NCCL, where too much or nothing is shared.

        Cost: Enqueues a kernel and two copies.
        """
        num_elements = values.numel()
        needed = _aligned(num_elements, values.dtype)
        shared = self._shared.get(values.dtype)
        if shared is None or shared.numel() < needed or _num_bytes(values) > self._most_bytes:
            dist.all_reduce(values, group=self.group)
            self.scaling.take_back(values)
            return
        if not num_elements:
            return
        shared = shared[:needed]
        shared[:num_elements].copy_(values)
        name, kernels = self.group.group_name, torch.ops.symm_mem
        if needed * values.element_size() <= self._one_shot_bytes:
            summed = torch.empty_like(shared)
            kernels.one_shot_all_reduce_out(shared, "sum", name, summed)
        else:
            summed = kernels.two_shot_all_reduce_(shared, "sum", name)
        torch.div(summed[:num_elements], self.scaling.excess, out=values)

    def close(self) -> None:
        """Give the shared memory back."""
        self._shared = {}

    def _rendezvous(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        # Multicast needs a service of the host that many lack, and fails there only when it is used.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        from torch.distributed import _symmetric_memory

        memory: Any = _symmetric_memory
        try:
            shared: Tensor = memory.empty(num_elements, dtype=dtype, device=self.world.device)
            memory.rendezvous(shared, self.group)
        except RuntimeError as error:
            raise PlanError(
                "wanted GPUs that share memory for sync.algorithm='two_shot', got "
                f"{str(error).splitlines()[0]!r} ({self.world.device}); {_INSTEAD}"
            ) from error
        return shared.zero_()


def check_offered(missing: tuple[str, ...], hosts: list[list[int]]) -> None:
    """See that this torch has the kernels, and that the workers share a host.

    Raises:
        PlanError: it has not, or they do not.
    """
    if missing:
        raise PlanError(
            "wanted a torch with kernels on symmetric memory for sync.algorithm='two_shot', got "
            f"{torch.__version__} without {', '.join(missing)}; {_INSTEAD}"
        )
    if len(hosts) > 1:
        raise PlanError(
            f"wanted workers on one host for sync.algorithm='two_shot', got {len(hosts)} hosts; {_INSTEAD}, "
            "or 'hierarchical'"
        )


def check_dtype(dtype: torch.dtype) -> None:
    """See that the kernels know a type.

    Raises:
        PlanError: they do not.
    """
    if dtype not in DTYPES:
        raise PlanError(
            "wanted parameters of float32 or bfloat16 for sync.algorithm='two_shot', got "
            f"{str(dtype).removeprefix('torch.')}; {_INSTEAD}"
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


def _num_bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()
