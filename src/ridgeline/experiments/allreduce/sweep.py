"""The sizes of the sweep, and the ways to reduce a tensor of one: the backend's, and each of ours."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline import units
from ridgeline.errors import PlanError
from ridgeline.experiments.contests import captured, nothing
from ridgeline.experiments.ways.case import Case, Contest, Way, WayRunner
from ridgeline.experiments.ways.result import WayKind
from ridgeline.experiments.ways.together import GroupRequest
from ridgeline.laws.collectives import bus_bandwidth_factor
from ridgeline.plan import Sync
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.loading import make_transport
from ridgeline.synchronisation import ALGORITHMS, check_sync, offered
from ridgeline.workers.world import World

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


def group_cases(world: World, asked: GroupRequest) -> Sequence[Case]:
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
        # As nccl-tests count them, so that figures compare with theirs.
        bus_bytes=num_bytes * bus_bandwidth_factor("all_reduce", world.size),
    )


def _contest(world: World, num_bytes: int) -> Contest:
    # Other values on each worker: of equal ones nobody sees whether they were exchanged.
    generator = torch.Generator().manual_seed(world.rank)
    values = torch.randn(num_bytes // 4, generator=generator).to(world.device)
    backend = dist.get_backend(group=world.group())
    ways = _ways(f"{backend} all_reduce", "peer", partial(_backend, world, values), world)
    for name in offered(world.kind):
        entry = ALGORITHMS[name]
        if entry.is_exact and not (entry.shards_update or entry.replaces_update):  # no means
            make = partial(_ours, world, values, name)
            lacking = _refusal(name, world)
            ways += _ways(f"ridgeline {entry.label}", "ridgeline", make, world, lacking)
    return Contest(ways=ways)


class _Reduction(NamedTuple):
    """One way to reduce, over and over in the same memory.

    Attributes:
        once: Reduces what is there; timed on zeros, which stay what they are.
        fill: Writes this worker's values.
        mean: What is there then, as a mean; leaves zeros.
        close: Ends it.
    """

    once: Callable[[], None]
    fill: Callable[[], object]
    mean: Callable[[], Tensor]
    close: Callable[[], None] = nothing


def _ways(
    name: str, kind: WayKind, make: Callable[[], _Reduction], world: World, lacking: str = ""
) -> list[Way]:
    """A way to reduce; on GPUs also as captured steps have it."""
    ways = [Way(name, kind, lambda: _runner(make()), lacking)]
    if world.kind == "cuda":
        ways.append(Way(f"{name}, replayed", kind, lambda: _runner(_replayed(make())), lacking))
    return ways


def _runner(reduction: _Reduction) -> WayRunner:
    def results() -> Tensor:
        reduction.fill()
        reduction.once()
        return reduction.mean()

    return WayRunner(run=reduction.once, results=results, close=reduction.close)


def _replayed(reduction: _Reduction) -> _Reduction:
    """In a CUDA graph, whose replay leaves out what the host does for each call."""
    # Called before the capture, in which NCCL connects and kernels are loaded.
    graph, _ = captured(reduction.once)

    def close() -> None:
        graph.reset()
        reduction.close()

    return reduction._replace(once=graph.replay, close=close)


def _refusal(name: str, world: World) -> str:
    """Why an algorithm is not for these workers; empty where it is. All workers call this."""
    try:
        check_sync(Sync(algorithm=name), world.size, world.kind)
        make_transport(Sync(algorithm=name), world).close()  # some ask who shares a host
    except PlanError as error:
        return str(error)
    return ""


def _backend(world: World, values: Tensor) -> _Reduction:
    """The sum, by one call."""
    flat = torch.zeros_like(values)

    def mean() -> Tensor:
        found = flat / world.size
        flat.zero_()
        return found

    return _Reduction(
        once=lambda: dist.all_reduce(flat, group=world.group()),
        fill=lambda: flat.copy_(values),
        mean=mean,
    )


def _ours(world: World, values: Tensor, algorithm: str) -> _Reduction:
    """The mean of a bucket, as in a step: started, waited for and settled."""
    transport = make_transport(Sync(algorithm=algorithm), world)
    # Buckets are cut from parameters; the values of this one are never read.
    parameter = nn.Parameter(torch.empty_like(values))
    bucket = Bucket(0, [("values", parameter)], allocate=transport.allocate)
    transport.arranged((bucket,))
    bucket.flat.zero_()

    def once() -> None:
        future = transport.reduce(bucket)
        if future is not None:
            future.wait()
        transport.settle(bucket)

    def mean() -> Tensor:
        found = bucket.views[0].clone()
        bucket.flat.zero_()
        return found

    return _Reduction(
        once=once,
        fill=lambda: bucket.views[0].copy_(values * transport.scale),
        mean=mean,
        close=transport.close,
    )
