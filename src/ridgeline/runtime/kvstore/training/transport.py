"""Buckets that are pushed to a store: what comes back is no mean but the parameters that it has updated.

Each parameter is a key, and a bucket is one call. Which of its gradients no worker has must be known before a
push, for a push is an update: so where workers wait for each other its flags are added up first.
"""

import contextlib
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.errors import PlanError, WorkloadError
from ridgeline.runtime.kvstore.kinds import make_shelf
from ridgeline.runtime.kvstore.serving.joining.gathering import Wanted
from ridgeline.runtime.kvstore.training.store import TrainingStore
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.transports.scaling import UNSCALED, Scaling
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import OptionValue
from ridgeline.synchronisation.serving import KIND, SERVERS, SNAPSHOTS, STALENESS, is_synchronous
from ridgeline.workers.agree import share_text
from ridgeline.workers.world import World


class StoreTransport(Transport):
    """Pushes buckets and pulls parameters; see `synchronizer`.

    Args:
        world: This worker's place; size at least 2.
        options: Kind, staleness, servers and snapshots; see `synchronisation.serving`.

    Attributes:
        waits: Whether all workers take the same steps.
        bound: How many pushes of a parameter a worker may be ahead of others; -1: any number.
        adds_up: Whether an update is that by the gradients of all workers.
        pushes_all: Whether others wait for a worker's push of each key.
        store: Holds the parameters.
        rescale: What sums must be multiplied by to be means.

    Raises:
        PlanError: workers do not wait for each other, and are not all of the job.
        KVStoreError: a server does not start, or the workers are on several hosts without keys.

    Cost: Where workers need not wait, starts servers.
    """

    carries_flags = True

    def __init__(self, world: World, options: Mapping[str, OptionValue]) -> None:
        super().__init__(world, options)
        self.waits = is_synchronous(options)
        self.bound = int(options[STALENESS.name])
        self.adds_up = self.waits or self.bound == 0
        self.pushes_all = not self.waits and self.bound >= 0
        self._used: dict[str, bool] = {}
        self._snapshots = ""
        kind = str(options[KIND.name])
        if world.joins:
            shelf, threads = make_shelf(kind, wanted=Wanted(join=world.joins))
        elif self.waits:
            # Its lane is the only one that uses the group while gradients are on their way.
            shelf, threads = make_shelf(kind, self.group)
        else:
            _check_whole_job(world, kind)
            servers = int(options[SERVERS.name])
            staleness = None if self.bound < 0 else self.bound
            self._snapshots = _own_folder(str(options[SNAPSHOTS.name]), world)
            wanted = Wanted(servers, staleness, snapshots=self._snapshots)
            shelf, threads = make_shelf(kind, wanted=wanted)
        self.store = TrainingStore(kind, shelf, threads=threads)
        # However many join and leave: a push remains of the size that the learning rate was chosen for.
        scaling = Scaling.over(self.store.num_workers) if self.adds_up else UNSCALED
        self.scale, self.rescale = scaling.factor, 1.0 / scaling.excess

    def mean(self, values: Tensor) -> None:
        """There is none.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "wanted a transport that makes means, got a store, which updates parameters; use another one"
        )

    def reduce(self, bucket: Bucket) -> "Future[Any] | None":
        """Push a bucket's gradients, and leave the updated parameters in their places."""
        self.count(bucket.payload)
        if self.waits:
            dist.all_reduce(bucket.behind, group=self.group)
        elif self.pushes_all:
            self._raise_flags_of_used(bucket)
        members = zip(bucket.names, bucket.views, bucket.flags.tolist(), strict=True)
        values = {name: view for name, view, is_used in members if is_used}
        if values:
            self.store.exchange(values)
        return None

    def take_part(self, parameters: Mapping[str, Tensor]) -> None:
        """Continue from what the workers of a training that runs have come to, as one of them.

        Raises:
            KVStoreError: see `TrainingStore.take_part`.
        """
        used = self.store.take_part(parameters)
        self._used |= {name: name in used for name in parameters}

    def close(self) -> None:
        """Close the store; the server beside this worker ends once all workers have left it.

        Raises:
            KVStoreError: a server says nothing.
            OSError: what it has written cannot be removed.
        """
        try:
            self.store.close()
        finally:
            if self._snapshots:
                _remove_own(self._snapshots, self.store.rank)

    def _raise_flags_of_used(self, bucket: Bucket) -> None:
        """Push nothing but zeros where others have a gradient, which the first step found."""
        if any(name not in self._used for name in bucket.names):
            flags = bucket.flags.clone()
            dist.all_reduce(flags, group=self.group)
            self._used |= zip(bucket.names, (flag > 0 for flag in flags.tolist()), strict=True)
        for position, (name, flag) in enumerate(zip(bucket.names, bucket.flags, strict=True)):
            if flag and not self._used[name]:
                raise WorkloadError(
                    f"wanted gradients of the parameters that the first step used, got one of {name}, whose "
                    f"pushes others would wait for; leave out sync.options[{STALENESS.name!r}], or use it "
                    "in the first step of one of the workers"
                )
            # Others wait for a push of each key, from workers without a gradient, too.
            bucket.flags[position] = float(self._used[name])


def _check_whole_job(world: World, kind: str) -> None:
    """Refuse workers that are some of a job, whose servers all workers look for."""
    everyone = dist.get_world_size(dist.group.WORLD)
    if world.size != everyone:
        raise PlanError(
            f"wanted all {everyone} workers of the job for sync.options[{KIND.name!r}]="
            f"{kind!r}, got {world.size} of them; train over all, or use another kind"
        )


def _own_folder(parent: str, world: World) -> str:
    """A new name in a folder, the same on all workers, who wait for each other; empty for none."""
    if not parent:
        return ""
    return str(Path(parent) / share_text(f"run-{secrets.token_hex(8)}", world))


def _remove_own(folder: str, rank: int) -> None:
    """Remove what the server beside a worker has written, and the folder once that of all others is gone."""
    for own in Path(folder).glob(f"server-{rank}-of-*"):
        shutil.rmtree(own)
    with contextlib.suppress(OSError):  # others have theirs in it, or have removed it
        Path(folder).rmdir()
