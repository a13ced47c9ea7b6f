"""The cases `shards-...`: what a second server brings, by what working a sum in takes beside sending it.

One worker pushes and pulls; each server works in with one thread. What is compared is the value after the
first push.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch

from ridgeline import units
from ridgeline.experiments.ways.case import Case, Contest, Way, WayRunner
from ridgeline.runtime import kvstore
from ridgeline.workers.world import World


class Pushed(NamedTuple):
    """What servers work in: so many values of a shape, by an optimizer with these settings."""

    settings: dict[str, Any]
    values: int
    shape: tuple[int, int]


OPTIMIZERS = {
    "adam": Pushed({"lr": 0.01}, 1, (4096, 1024)),
    "rprop": Pushed({"lr": 0.01}, 1, (4096, 1024)),
    "muon": Pushed({"lr": 0.01}, 4, (256, 256)),
}
"""Adam takes about as long as the sum takes to arrive. Rprop takes seven times that, the longest of those of
torch that update element by element. Muon multiplies matrices, beside which all else is little: in 16 bits,
for which some processors take twenty times as long, so they are small. It takes whole values, which are
divided among servers by their number."""
CASES = {f"shards-{name}": name for name in OPTIMIZERS}
SERVERS = (1, 2)
PUSHES = 4
"""Of a run: all are sent before the value is asked for, so that servers are never without work."""


def shards_cases(world: World) -> list[Case]:
    """The worker with the last number pushes to one server, and to two, one case an optimizer."""
    return [
        Case(
            name=case,
            title=f"{PUSHES} pushes of {_words(OPTIMIZERS[optimizer])} of float32 worked in by {optimizer}, "
            "and a pull, over the loopback, one worker",
            prepare=partial(_contest, world, optimizer),
            units=PUSHES,
            unit="push",
            calls=1,
        )
        for case, optimizer in CASES.items()
    ]


def _words(work: Pushed) -> str:
    size = units.num_bytes(4 * math.prod(work.shape))
    return size if work.values == 1 else f"{work.values} values of {size}"


def _contest(world: World, optimizer: str) -> Contest:
    ways = [
        Way(
            f"ridgeline dist_async, {units.counted(servers, 'server')}",
            "ridgeline" if servers > 1 else "peer",
            partial(_runner, world, optimizer, servers),
        )
        for servers in SERVERS
        # Servers run in the processes of workers.
        if servers <= world.size
    ]
    return Contest(ways=ways)


def _runner(world: World, optimizer: str, servers: int) -> WayRunner:
    generator = torch.Generator().manual_seed(0)
    work = OPTIMIZERS[optimizer]
    keys = [f"w{number}" for number in range(work.values)]
    values = [torch.randn(*work.shape, generator=generator) for _ in keys]
    store = kvstore.create("dist_async", servers=servers)
    store.init(keys, [torch.zeros_like(value) for value in values])
    store.set_optimizer(optimizer, **work.settings)
    out = [torch.empty_like(value) for value in values]

    def run(pushes: int) -> list[torch.Tensor]:
        if world.rank == world.size - 1:
            for _ in range(pushes):
                store.push(keys, values)
            store.pull(keys, out)
        return out

    def results() -> list[torch.Tensor]:
        # One push, after which the value is the same however many servers there are.
        run(1)
        # All pushes are in before anybody reads, and all have read before anybody pushes again.
        store.barrier()
        found = [store.pull(key).get() for key in keys]
        store.barrier()
        return found

    return WayRunner(run=lambda: run(PUSHES), results=results, close=store.close)
