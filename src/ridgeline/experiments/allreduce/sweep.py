"""The sizes of the sweep, and the ways to reduce a tensor of one: the backend's, and each of ours."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline import units
from ridgeline.errors import PlanError
from ridgeline.experiments.ways.case import Case, Contest, Runner, Way
from ridgeline.experiments.ways.together import Asked
from ridgeline.laws.collectives import bus_bandwidth_factor
from ridgeline.plan import Sync
from ridgeline.runtime.sync.buckets import Bucket
from ridgeline.runtime.sync.loading import make_transport
from ridgeline.runtime.world import World
from ridgeline.synchronisation import ALGORITHMS, check_sync, offered

SIZES = {
    "1KiB": 1 << 10,
    "16KiB": 1 << 14,
    "256KiB": 1 << 18,
    "1MiB": 1 << 20,
    "4MiB": 1 << 22,
    "16MiB": 1 << 24,
    "64MiB": 1 << 26,
    "256MiB": 1 << 28,
}
CASES = tuple(SIZES)
MOST_ON_CPU = 1 << 26


def group_cases(world: World, asked: Asked) -> Sequence[Case]:
    """A case a size, for workers of a process group."""
    return [_case(world, name, num_bytes) for name, num_bytes in SIZES.items()]


def _case(world: World, name: str, num_bytes: int) -> Case:
    backend = dist.get_backend(group=world.group())
    is_large = world.kind == "cpu" and num_bytes > MOST_ON_CPU
    return Case(
        name=name,
        title=f"{units.num_bytes(num_bytes)} of float32 over {world.size} workers, {backend}",
        prepare=partial(_contest, world, num_bytes),
        lacking="a size for GPUs" if is_large else "",
        unit="all-reduce",
        bus_bytes=num_bytes * bus_bandwidth_factor("all_reduce", world.size),
    )


def _contest(world: World, num_bytes: int) -> Contest:
    generator = torch.Generator().manual_seed(world.rank)
    values = torch.randn(num_bytes // 4, generator=generator).to(world.device)
    backend = dist.get_backend(group=world.group())
    ways = [Way(f"{backend} all_reduce", "peer", partial(_backend, world, values))]
    for name in offered(world.kind):
        entry = ALGORITHMS[name]
        if entry.is_exact and not entry.shards_update:  # a part of the mean is no all-reduce
            make = partial(_ours, world, values, name)
            ways.append(Way(f"ridgeline {entry.label}", "ridgeline", make, _refusal(name, world)))
    return Contest(ways=ways)


def _refusal(name: str, world: World) -> str:
    """Why an algorithm is not for these workers; empty where it is."""
    try:
        check_sync(Sync(algorithm=name), world.size, world.kind)
    except PlanError as error:
        return str(error)
    return ""


def _backend(world: World, values: Tensor) -> Runner:
    """The sum, by one call; timed on zeros, which stay what they are."""
    flat = torch.zeros_like(values)

    def once() -> None:
        dist.all_reduce(flat, group=world.group())

    def results() -> Tensor:
        flat.copy_(values)
        once()
        mean = flat / world.size
        flat.zero_()
        return mean

    return Runner(run=once, results=results)


def _ours(world: World, values: Tensor, algorithm: str) -> Runner:
    """The mean of a bucket, as in a step: started, waited for and settled."""
    transport = make_transport(Sync(algorithm=algorithm), world)
    bucket = Bucket(0, [("values", nn.Parameter(torch.empty_like(values)))])
    transport.arranged((bucket,))
    bucket.flat.zero_()

    def once() -> None:
        future = transport.reduce(bucket)
        if future is not None:
            future.wait()
        transport.settle(bucket)

    def results() -> Tensor:
        bucket.views[0].copy_(values * transport.scale)
        once()
        mean = bucket.views[0].clone()
        bucket.flat.zero_()
        return mean

    return Runner(run=once, results=results, close=transport.close)
