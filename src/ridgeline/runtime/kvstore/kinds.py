"""The kinds of stores, and how one is made."""

import contextlib
import os
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ridgeline.errors import KVStoreError
from ridgeline.given import checked
from ridgeline.host.memory import keep_freed_memory
from ridgeline.host.message_threads import calm_message_threads
from ridgeline.runtime.kvstore.serving.joining.gathering import (
    DEFAULTS,
    Gathered,
    Wanted,
    gather,
    gather_later,
)
from ridgeline.runtime.kvstore.serving.worker.channel import PARKED_S
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.store import KVStore
from ridgeline.runtime.kvstore.values.collective import CollectiveShelf
from ridgeline.runtime.kvstore.values.local import LocalShelf
from ridgeline.runtime.kvstore.values.shelf import Shelf
from ridgeline.workers import attendance
from ridgeline.workers.world import World

MOST_THREADS = 4
"""That sum and update different keys side by side. Source: MXNet, MXNET_KVSTORE_REDUCTION_NTHREADS."""


class Kind(NamedTuple):
    """What a name means.

    Attributes:
        spans_workers: Pushes are those of all workers.
        on_device: Sums are taken on GPUs where values are there, else on the CPU.
        has_servers: Values are in processes of their own, and workers need not wait for each other.
    """

    spans_workers: bool
    on_device: bool
    has_servers: bool = False


KINDS: dict[str, Kind] = {
    "local": Kind(spans_workers=False, on_device=False),
    "device": Kind(spans_workers=False, on_device=True),
    "dist_sync": Kind(spans_workers=True, on_device=False),
    "dist_device_sync": Kind(spans_workers=True, on_device=True),
    "dist_async": Kind(spans_workers=True, on_device=False, has_servers=True),
}
"""Name to kind."""


@checked(KVStoreError)
def create(
    name: str = "local",
    *,
    process_group: dist.ProcessGroup | None = None,
    staleness: int | None = None,
    servers: int = 0,
    server_module: str = "",
    address: str = "",
    keys: str | os.PathLike[str] = "",
    snapshots: str | os.PathLike[str] = "",
    join: str = "",
) -> KVStore:
    """A key-value store.

    Args:
        name: `local`: sums over the devices of this process are taken on the CPU. `device`: on one of the
            GPUs that push. `dist_sync`: over all workers of the job (started by torchrun, or an initialised
            process group), on the CPU and by gloo. `dist_device_sync`: on the GPUs and by NCCL, where
            there are. `dist_async`: values are in servers, which work each push in as it comes. Without a
            job, all of these are a worker alone.
        process_group: The workers that push together, where they are some of the job; not for
            `dist_async`. While the store is open, nothing else may use the group: what a store sends leaves
            in a thread of its own. Without it the store makes one of all workers of the job.
        staleness: Of `dist_async`: a pull waits until no worker is more than so many pushes of its key behind
            this worker. 0 adds up the pushes of a round and is synchronous; None never waits.
        servers: Of `dist_async`: the first so many workers start one beside themselves; 0: all do.
        server_module: Of `dist_async`: imported in servers, to register updaters.
        address: Of `dist_async`: where the server of this worker listens, such as `tcp://10.0.0.3:*`. Without
            it: on the loopback where all workers are on one host, else where this host reaches MASTER_ADDR.
        keys: Of `dist_async`: the directory of keys that let workers and servers in, which
            `ridgeline kvserver --new-keys DIR` makes; without it that of RIDGELINE_KVSTORE_KEYS. Workers on
            several hosts need one.
        snapshots: Of `dist_async`: a folder in which servers write down what they hold. One that dies is then
            replaced and nothing that it took is lost; a store made again with the folder continues from
            there.
        join: Of `dist_async`: the address of a store that runs (`KVStore.address` of its workers), to take
            part in as one more worker, from a process outside of its job. Its values stay as they are.

    Raises:
        KVStoreError: no such kind, a group of another backend, an argument that is not for this kind or
            makes no sense, workers on several hosts without keys, keys that cannot be read, or a server that
            does not start; what goes wrong for one worker is reported to all.
        AbsentWorkerError: of `dist_async`: another worker does not come within the time-out of the job, or
            starts its server for longer than that; names it.
        PlanError: this worker is not in the group.

    Cost: With several workers waits until all have called it, and takes a process group of its own, or
        starts processes.

    Example:
        >>> with create("local") as store:
        ...     store.init(3, torch.zeros(2))
        ...     store.push(3, [torch.ones(2), torch.ones(2)])
        ...     store.pull(3).get()
        tensor([2., 2.])
    """
    folders = os.fspath(keys), os.fspath(snapshots)
    wanted = Wanted(servers, staleness, server_module, address, *folders, join)
    shelf, threads = make_shelf(name, process_group, wanted)
    return KVStore(name, shelf, threads=threads)


def make_shelf(
    name: str, process_group: dist.ProcessGroup | None = None, wanted: Wanted = DEFAULTS
) -> tuple[Shelf, int]:
    """Where a store has its values, and how many threads work on them; arguments and errors as `create`."""
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise KVStoreError(f"wanted a kind of store ({', '.join(KINDS)}), got {name!r}")
    threads = max(1, min(MOST_THREADS, os.cpu_count() or 1))
    if kind.has_servers:
        if process_group is not None:
            raise KVStoreError(f"wanted no process_group for {name!r}, got one; servers need none")
        return _joined(wanted) if wanted.join else _served(wanted), threads
    if wanted != DEFAULTS:
        raise KVStoreError(
            "wanted staleness, servers, server_module, address, keys, snapshots and join for 'dist_async' "
            f"alone, got one for {name!r}"
        )
    shelf = _workers(kind, process_group) if kind.spans_workers else None
    if shelf is None:
        return LocalShelf(on_device=kind.on_device), threads
    # One thread: all workers exchange in one order.
    return shelf, 1


def _served(wanted: Wanted) -> Shelf:
    """The shelf of a worker whose values are in servers, one of which it may start."""
    world = World.join()
    staleness, servers = wanted.staleness, wanted.num_servers
    if staleness is not None and (not isinstance(staleness, int) or staleness < 0):
        raise KVStoreError(f"wanted staleness as a number from 0 on, or None, got {staleness!r}")
    if not isinstance(servers, int) or not 0 <= servers <= world.size:
        raise KVStoreError(f"wanted servers from 1 to {world.size}, one a worker, got {servers!r}")
    wanted, patience_s = wanted._replace(num_servers=servers or world.size), world.timeout_s
    with attendance.phase("the start of servers", world):
        found = gather(world, wanted, patience_s)
    return _remote(found, world.rank, world.size, min(PARKED_S, patience_s))


def _remote(
    found: Gathered, rank: int, num_workers: int, parked_s: float = PARKED_S
) -> RemoteShelf:
    return RemoteShelf(
        found.addresses,
        rank,
        num_workers,
        found.beside,
        keys=found.keys,
        notice=found.notice,
        members=found.members,
        parked_s=parked_s,
    )


def _joined(wanted: Wanted) -> Shelf:
    """The shelf of a worker that comes later than others."""
    # Not by `World.join`: this process is in no group with those who began.
    found = gather_later(wanted)
    assert found.members is not None, "it was read what they are"
    keep_freed_memory()
    shelf = _remote(found, found.members.next_rank(), found.members.record.num_workers)
    try:
        shelf.join()
    except KVStoreError:
        with contextlib.suppress(KVStoreError):  # of the same
            shelf.close()
        raise
    return shelf


def _workers(kind: Kind, process_group: dist.ProcessGroup | None) -> Shelf | None:
    """The shelf of the workers of a job; None for a worker alone."""
    world = World.join(process_group=process_group)
    if world.size == 1:
        return None
    device = world.device if kind.on_device else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    owns_group, group = process_group is None, process_group
    if group is None:
        # In a thread of the store's own: the group of the job belongs to others.
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=world.timeout_s))
        calm_message_threads()
    else:
        _check_backend(group, backend, device)
    assert isinstance(group, dist.ProcessGroup), "all workers of the job are in it"
    # Of the store's group: its pushes are in no order with the steps of the job's.
    own = World.join(device=device.type, process_group=group)
    return CollectiveShelf(group, device, owns_group=owns_group, present=attendance.of(own))


def _check_backend(group: dist.ProcessGroup, backend: str, device: torch.device) -> None:
    """Refuse a group that does not carry tensors of a device."""
    # Device by device, as one group can have gloo for CPUs and NCCL for GPUs.
    config = dist.BackendConfig(dist.Backend(dist.get_backend_config(group)))
    if config.get_device_backend_map().get(device.type) != backend:
        raise KVStoreError(
            f"wanted a process group with {backend} for tensors on {device.type}, got one with "
            f"{dist.get_backend_config(group)}; make it with new_group(..., backend={backend!r})"
        )
