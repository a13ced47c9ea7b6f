"""The cases `shards-...`: what a second server brings, by what working a sum in takes beside sending it.

One worker pushes and pulls; each server works in with one thread. What is compared is the value after the
first push.
"""

from functools import partial
from typing import Any

import torch

from ridgeline import units
from ridgeline.experiments.ways.case import Case, Contest, Runner, Way
from ridgeline.runtime import kvstore
from ridgeline.runtime.world import World

OPTIMIZERS: dict[str, dict[str, Any]] = {"adam": {"lr": 0.01}, "rprop": {"lr": 0.01}}
"""Adam takes about as long as the sum takes to arrive. Rprop takes seven times that, the longest of those of
torch that update element by element."""
CASES = {f"shards-{name}": name for name in OPTIMIZERS}
NUM_BYTES = 1 << 24
ROW = 1024
SERVERS = (1, 2)
PUSHES = 4
"""Of a run: all are sent before the value is asked for, so that servers are never without work."""


def shards_cases(world: World) -> list[Case]:
    """The worker with the last number pushes to one server, and to two, one case an optimizer."""
    return [
        Case(
            name=case,
            title=f"{PUSHES} pushes of {units.num_bytes(NUM_BYTES)} of float32 worked in by {optimizer}, "
            "and a pull, over the loopback, one worker",
            prepare=partial(_contest, world, optimizer),
            units=PUSHES,
            unit="push",
            calls=1,
        )
        for case, optimizer in CASES.items()
    ]


def _contest(world: World, optimizer: str) -> Contest:
    ways = [
        Way(
            f"ridgeline dist_async, {servers} server{'s' * (servers > 1)}",
            "ridgeline" if servers > 1 else "peer",
            partial(_runner, world, optimizer, servers),
        )
        for servers in SERVERS
        if servers <= world.size
    ]
    return Contest(ways=ways)


def _runner(world: World, optimizer: str, servers: int) -> Runner:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(NUM_BYTES // 4 // ROW, ROW, generator=generator)
    store = kvstore.create("dist_async", servers=servers)
    store.init("w", torch.zeros_like(values))
    store.set_optimizer(optimizer, **OPTIMIZERS[optimizer])
    out = torch.empty_like(values)

    def run(pushes: int) -> torch.Tensor:
        if world.rank == world.size - 1:
            for _ in range(pushes):
                store.push("w", values)
            store.pull("w", out)
        return out

    def results() -> torch.Tensor:
        run(1)
        store.barrier()
        found = store.pull("w").get()
        store.barrier()
        return found

    return Runner(run=lambda: run(PUSHES), results=results, close=store.close)
