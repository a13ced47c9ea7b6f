"""Two workers over gloo that train by a store with servers, and processes of their own that join them.

torchrun.py 2 joining_worker.py STALENESS KILLS, and by itself: joining_worker.py ADDRESS DIES
"""

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.runtime import kvstore
from ridgeline.runtime.kvstore import KVStore
from ridgeline.runtime.kvstore.values import placement
from ridgeline.workers.world import World
from torchrun import Later

ROWS, WIDTH = 12, 3
BEFORE, TOGETHER, DYING = 5, 8, 3
FIRST_VALUE = 100.0
KEYS = ["n", "w"]


def push(store: KVStore) -> None:
    """Ones times rank + 1, which an optimizer takes off the values."""
    brought = store.rank + 1.0
    store.push(KEYS, [torch.tensor(brought), torch.full((ROWS, WIDTH), brought)])


def seen(store: KVStore) -> list[Any]:
    """Values, and the pushes that they hold: with the first value they tell who has pushed how often."""
    found = []
    for key in KEYS:
        reading = store.pull(key)
        value = reading.get()
        taken = sum((rank + 1) * count for rank, count in reading.versions.items())
        # Parts of a key may hold more than all of them do.
        assert isinstance(value, Tensor)
        assert bool((value <= FIRST_VALUE - taken).all())
        found.append([value.double().tolist(), {**reading.versions}])
    return found


def say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train until all who joined have left."""
    staleness = None if sys.argv[1] == "None" else int(sys.argv[1])
    placement.LARGE_ELEMENTS = 30  # `w` is divided, and who joins has to find out how
    world = World.join(threads=1, device="cpu")
    with kvstore.create("dist_async", staleness=staleness, servers=2) as store:
        assert store.present() == (0, 1)
        # One by one, else than who joins.
        store.init("w", torch.full((ROWS, WIDTH), FIRST_VALUE))
        store.init("n", torch.tensor(FIRST_VALUE))
        store.set_optimizer("sgd", lr=1.0)
        for _ in range(BEFORE):
            push(store)
            seen(store)
        store.barrier()
        told = []
        for number, dies in enumerate([True, False] if sys.argv[2] == "kills" else [False]):
            told.append(with_another(store, world, dies=dies, later=number + 2))
        store.barrier()
        values = [store.pull(key).get().double().tolist() for key in KEYS]
        versions = [store.versions(key) for key in KEYS]
        present = store.present()
        store.barrier()
    if world.rank == 0:
        say({"joined": told, "values": values, "versions": versions, "at": present})
    World.leave()


def with_another(store: KVStore, world: World, *, dies: bool, later: int) -> Any:
    """Go on while a process joins, pushes and leaves; what it says."""
    process = None
    if world.rank == 0:
        process = Later(store.address, "dies" if dies else "leaves")
    has_come, ends = False, torch.zeros(1)
    while not ends:
        push(store)
        # Known by its pushes, since it may come and leave between two looks; looked at before whether it is there.
        _, versions = seen(store)[0]
        has_come |= later in versions
        is_there = later in store.present()
        ends.fill_(float(has_come and not is_there))
        # Both push equally often.
        dist.broadcast(ends, 0)
    if process is None:
        return None
    out, status = process.communicate()
    assert status == (-signal.SIGKILL if dies else 0)
    return json.loads(out)


def join(address: str, *, dies: bool) -> None:
    """Take part in a store that runs, and leave it or die."""
    store = kvstore.create("dist_async", join=address)
    store.init(KEYS, [torch.tensor(0.0), torch.zeros(ROWS, WIDTH)])  # which are not taken
    begun = seen(store)
    for _ in range(DYING if dies else TOGETHER):
        push(store)
        last = seen(store)
    rank = str(store.rank)
    told = {"rank": store.rank, "num_workers": store.num_workers, "begun": begun, "last": last}
    say(told)
    assert last[0][1][int(rank)] == (DYING if dies else TOGETHER)
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


if __name__ == "__main__":
    if "RANK" in os.environ and "://" not in sys.argv[1]:
        main()
    else:
        join(sys.argv[1], dies=sys.argv[2] == "dies")
