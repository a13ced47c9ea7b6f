"""Which of the servers that held the same slices is the one to ask: the one of the newest epoch.

Epochs are counted by compare-and-set in a store of torch: a file beside the snapshots, in which a server
that starts takes the next one, and the store of the job, where workers look for a server that took another's
place.
"""

from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from ridgeline.workers.leaving import job_store
from ridgeline.workers.world import World

_COUNT = "epoch"


class FoundServer(NamedTuple):
    """A server.

    Attributes:
        epoch: Which one it is of those that held the same slices; 0: none of the workers knows yet.
        address: Where it is.
    """

    epoch: int
    address: str


class Claim:
    """An epoch that a server has taken for itself.

    Args:
        folder: Of its snapshots.

    Attributes:
        epoch: The number.
    """

    def __init__(self, folder: Path) -> None:
        self._store = dist.FileStore(str(folder / "epochs"), -1)
        # Set only where nothing is: what comes back is what the file holds.
        present = self._store.compare_set(_COUNT, "", "0")
        while True:
            wanted = str(int(present) + 1).encode()
            found = self._store.compare_set(_COUNT, present.decode(), wanted.decode())
            # Another process may have written the same number: only the one that adds a name of its own has
            # taken it.
            if found == wanted and self._store.add(f"{_COUNT} {int(wanted)}", 1) == 1:
                break
            present = found
        self.epoch = int(wanted)

    @property
    def is_newest(self) -> bool:
        """Whether no other server has taken a later one."""
        return int(self._store.compare_set(_COUNT, "", "0")) == self.epoch


class Notice:
    """Where workers of a job read that a server has taken the place of another one.

    Args:
        store: Of the job, or of this process for a worker alone.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def publish(self, place: int, found: FoundServer) -> bool:
        """Report a server; False: a newer one was reported."""
        name, mine = f"server {place}", f"{found.epoch} {found.address}"
        present = self._store.compare_set(name, "", mine).decode()
        while present != mine:
            # A server that was slow to begin must not hide one that has taken its place since.
            if _read(present).epoch >= found.epoch:
                return False
            present = self._store.compare_set(name, present, mine).decode()
        return True

    def newest(self, place: int) -> FoundServer | None:
        """The server of a place that was reported last; None: the one that was there at the beginning.

        Raises:
            RuntimeError: the store of the job is gone.
        """
        name = f"server {place}"
        return _read(self._store.get(name).decode()) if self._store.check([name]) else None


def own_store(world: World, topic: str) -> dist.Store:
    """A part of the store of a job, which other threads may use; one of this process for a worker alone.

    Args:
        world: The workers.
        topic: The same on all of them, and only there.
    """
    if world.size == 1:
        return dist.HashStore()
    return dist.PrefixStore(topic, cast(Any, job_store()).clone())  # stubs do not know `clone`


def _read(told: str) -> FoundServer:
    epoch, address = told.split(" ", 1)
    return FoundServer(int(epoch), address)
