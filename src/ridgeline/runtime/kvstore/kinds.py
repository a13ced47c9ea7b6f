"""The kinds of stores, and how one is made."""

import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.collective import CollectiveShelf
from ridgeline.runtime.kvstore.local import LocalShelf
from ridgeline.runtime.kvstore.shelf import Shelf
from ridgeline.runtime.kvstore.store import KVStore
from ridgeline.runtime.world import World

MOST_THREADS = 4
"""That sum and update different keys side by side. Source: MXNet, MXNET_KVSTORE_REDUCTION_NTHREADS."""


class Kind(NamedTuple):
    """What a name means.

    Attributes:
        spans_workers: Pushes add up those of all workers.
        on_device: Sums are taken on GPUs where values are there, else on the CPU.
    """

    spans_workers: bool
    on_device: bool


KINDS: dict[str, Kind] = {
    "local": Kind(spans_workers=False, on_device=False),
    "device": Kind(spans_workers=False, on_device=True),
    "dist_sync": Kind(spans_workers=True, on_device=False),
    "dist_device_sync": Kind(spans_workers=True, on_device=True),
}
"""Name to kind. `dist_async` is known, and not there yet."""


def create(name: str = "local", *, process_group: dist.ProcessGroup | None = None) -> KVStore:
    """A key-value store.

    Args:
        name: `local`: sums over the devices of this process are taken on the CPU. `device`: on one of the
            GPUs that push. `dist_sync`: over all workers of the job (started by torchrun, or an initialised
            process group), on the CPU and by gloo. `dist_device_sync`: on the GPUs and by NCCL, where
            there are. Without a job both are a worker alone.
        process_group: The workers that push together, where they are some of the job. While the store is
            open, nothing else may use the group: what a store sends leaves in a thread of its own. Without
            it the store makes one of all workers of the job.

    Raises:
        KVStoreError: no such kind, or a group of another backend.
        PlanError: this worker is not in the group.

    Cost: With several workers waits until all have called it, and takes a process group of its own.

    Example:
        >>> with create("local") as store:
        ...     store.init(3, torch.zeros(2))
        ...     store.push(3, [torch.ones(2), torch.ones(2)])
        ...     store.pull(3).get()
        tensor([2., 2.])
    """
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        hint = "; it is not built yet" if name == "dist_async" else ""
        raise KVStoreError(f"wanted a kind of store ({', '.join(KINDS)}), got {name!r}{hint}")
    threads = max(1, min(MOST_THREADS, os.cpu_count() or 1))
    shelf = _workers(kind, process_group) if kind.spans_workers else None
    if shelf is None:
        return KVStore(name, LocalShelf(on_device=kind.on_device), threads=threads)
    # One thread: all workers exchange in one order.
    return KVStore(name, shelf, threads=1)


def _workers(kind: Kind, process_group: dist.ProcessGroup | None) -> Shelf | None:
    """The shelf of the workers of a job; None for a worker alone."""
    world = World.join(process_group=process_group)
    if world.size == 1:
        return None
    device = world.device if kind.on_device else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if process_group is not None:
        _check_backend(process_group, backend, device)
        return CollectiveShelf(process_group, device, owns_group=False)
    # In a thread of the store's own: the group of the job belongs to others.
    group = dist.new_group(backend=backend)
    assert isinstance(group, dist.ProcessGroup), "all workers of the job are in it"
    return CollectiveShelf(group, device, owns_group=True)


def _check_backend(group: dist.ProcessGroup, backend: str, device: torch.device) -> None:
    """Refuse a group that does not carry tensors of a device.

    Raises:
        KVStoreError: names the backend that does.
    """
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    if config.get_device_backend_map().get(device.type) != backend:
        raise KVStoreError(
            f"wanted a process group with {backend} for tensors on {device.type}, got one with "
            f"{dist.get_backend_config(group)}; make it with new_group(..., backend={backend!r})"
        )
