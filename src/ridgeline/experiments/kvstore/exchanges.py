"""The sizes, and the ways to bring a tensor to where it is worked in, and the value back.

All ways do `value -= sum`. Runs push zeros, so that values stay what they are; what is compared is a push of
this worker's numbers, after which the opposite is pushed.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline import units
from ridgeline.experiments.contests import nothing
from ridgeline.experiments.kvstore import ray_actor, shards, straggler
from ridgeline.experiments.ways.case import Case, Contest, Way, WayRunner
from ridgeline.experiments.ways.result import WayKind
from ridgeline.experiments.ways.together import GroupRequest
from ridgeline.runtime import kvstore
from ridgeline.runtime.kvstore.serving import segment
from ridgeline.workers.world import World

SIZES = {"64KiB": 1 << 16, "1MiB": 1 << 20, "16MiB": 1 << 24, "64MiB": 1 << 26}
ONE = "server-"
"""Head of the cases in which the last worker pushes to a server beside the first, and no other does."""
CASES = (*SIZES, *(f"{ONE}{name}" for name in SIZES), *shards.CASES, straggler.NAME)
ROW = 1024
"""Elements of a row; values are divided by rows."""


class _Exchange(NamedTuple):
    """A way to push and pull.

    Attributes:
        pushpull: Brings a tensor and returns the value afterwards; on workers that take part.
        serve: What worker 0 does for that in the cases of one worker, where it takes no part.
        settle: Returns once all workers have pushed.
        close: Ends it.
    """

    pushpull: Callable[[Tensor], Tensor]
    serve: Callable[[], object] = nothing
    settle: Callable[[], object] = nothing
    close: Callable[[], None] = nothing


Make = Callable[[World, Tensor], _Exchange]


def group_cases(world: World, asked: GroupRequest) -> Sequence[Case]:
    """Cases by size for all workers and for one; then one and two servers, and a worker that is slow."""
    by_size = [
        Case(
            name=f"{head}{name}",
            title=f"{units.num_bytes(size)} of float32, {who} over the loopback",
            prepare=partial(_contest, world, size, bool(head)),
            unit="push and pull",
            calls=20,
            bus_bytes=2.0 * size,
        )
        for head, who in (("", f"{world.size} workers"), (ONE, "one worker and one server"))
        for name, size in SIZES.items()
    ]
    return [*by_size, *shards.shards_cases(world), straggler.straggler_case(world)]


def _contest(world: World, num_bytes: int, is_one: bool) -> Contest:
    generator = torch.Generator().manual_seed(world.rank)
    values = torch.randn(num_bytes // 4 // ROW, ROW, generator=generator)
    take_part = world.rank == world.size - 1 or not is_one

    def way(name: str, kind: WayKind, make: Make, lacking: str = "") -> Way:
        return Way(name, kind, partial(_runner, make, world, values, take_part), lacking)

    if not is_one:
        ours = [
            way(f"ridgeline {kind}", "ridgeline", partial(_store, kind, 0))
            for kind in ("dist_sync", "dist_async")
        ]
        return Contest(ways=[way("gloo all_reduce", "peer", _all_reduce), *ours])
    return Contest(
        ways=[
            way("gloo messages", "peer", _messages),
            way("ridgeline dist_async", "ridgeline", partial(_store, "dist_async", 1)),
            way("ridgeline dist_async, sockets", "ridgeline", _by_sockets),
            way("actor of Ray", "peer", _actor, ray_actor.LACKING),
        ]
    )


def _runner(make: Make, world: World, values: Tensor, take_part: bool) -> WayRunner:
    exchange = make(world, values)
    zeros = torch.zeros_like(values)

    def bring(tensor: Tensor) -> Tensor:
        if take_part:
            return exchange.pushpull(tensor)
        if world.rank == 0:
            exchange.serve()
        return zeros

    def results() -> Tensor:
        bring(values)
        exchange.settle()
        found = bring(zeros).clone()
        exchange.settle()
        # Takes back what was pushed: all ways are timed on zeros.
        bring(-values)
        exchange.settle()
        return found

    return WayRunner(run=lambda: bring(zeros), results=results, close=exchange.close)


def _all_reduce(world: World, values: Tensor) -> _Exchange:
    """The sum by the backend, which every worker works into a copy of the value."""
    value, total = torch.zeros_like(values), torch.empty_like(values)

    def pushpull(tensor: Tensor) -> Tensor:
        total.copy_(tensor)
        dist.all_reduce(total, group=world.group())
        return value.sub_(total)

    return _Exchange(pushpull)


def _messages(world: World, values: Tensor) -> _Exchange:
    """The last worker sends to the first, which works it in and sends the value back."""
    value, total, out = (torch.zeros_like(values) for _ in range(3))
    group, client = world.group(), world.size - 1

    def pushpull(tensor: Tensor) -> Tensor:
        dist.send(tensor, group=group, group_dst=0)
        dist.recv(out, group=group, group_src=0)
        return out

    def serve() -> None:
        dist.recv(total, group=group, group_src=client)
        dist.send(value.sub_(total), group=group, group_dst=client)

    return _Exchange(pushpull, serve=serve)


def _by_sockets(world: World, values: Tensor) -> _Exchange:
    """A store of ours whose tensors go through sockets, as they do between hosts."""
    # For this store alone: others of this process share memory with their servers.
    with patch.dict(os.environ, {segment.VARIABLE: "0"}):
        exchange = _store("dist_async", 1, world, values)
        if world.rank == world.size - 1:
            exchange.pushpull(torch.zeros_like(values))  # decides it for good
    return exchange


def _actor(world: World, values: Tensor) -> _Exchange:
    """The last worker's own Ray, whose actor works the tensor in."""
    if world.rank < world.size - 1:
        return _Exchange(torch.zeros_like)
    server = ray_actor.ActorServer(values)
    return _Exchange(server.pushpull, close=server.close)


def _store(kind: str, servers: int, world: World, values: Tensor) -> _Exchange:
    """A store of ours, which takes the sum as the gradient of plain SGD."""
    store = kvstore.create(kind, servers=servers)
    store.init("w", torch.zeros_like(values))
    store.set_optimizer("sgd", lr=1.0)
    out = torch.empty_like(values)

    def pushpull(tensor: Tensor) -> Tensor:
        store.pushpull("w", tensor, out)
        return out

    return _Exchange(pushpull, settle=store.barrier, close=store.close)
