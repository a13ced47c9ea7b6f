"""How gradients are laid out for sending: their order, the buckets cut by it, and each one's place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.plan import Sync, cut_buckets
from ridgeline.runtime.sync.buckets.buckets import Allocate, Bucket, zeros
from ridgeline.simulator.frames import step_frames
from ridgeline.synchronisation import is_bucket_frame, num_shards
from ridgeline.workers import attendance
from ridgeline.workers.world import World

Named = tuple[str, nn.Parameter]
NUM_SIGNALS = 10
"""Of the first bucket; see `outside_writes`."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The buckets of some parameters; parameters are known by their position among all.

    Attributes:
        order: Parameters as their gradients are expected.
        buckets: In launch order.
        members: The parameters of each bucket.
        places: Bucket, and position in it, by parameter.
        views: The gradient's place in its bucket, by parameter.
        backward_names: Frames of backward: until the first bucket leaves, and after each.
        exchange_names: Frames in which the buckets are exchanged.
    """

    order: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    members: tuple[tuple[int, ...], ...]
    places: Mapping[int, tuple[Bucket, int]]
    views: Mapping[int, Tensor]
    backward_names: tuple[str, ...]
    exchange_names: tuple[str, ...]


def arrange(
    parameters: Sequence[Named],
    order: Sequence[int],
    sync: Sync,
    *,
    workers: int,
    has_buffers: bool,
    allocate: Allocate = zeros,
) -> Arrangement:
    """Cut buckets and allocate them.

    Args:
        parameters: (name, parameter) of all that require gradients.
        order: Their positions as their gradients are expected.
        sync: Has the limits of the buckets, names their frames, and says whether they have parts.
        workers: At least 2.
        has_buffers: Whether buffers are sent too, which has a frame of its own.
        allocate: Makes the memory of each.
    """
    named = [parameters[index] for index in order]
    cuts = cut_buckets(sizes_of(named), sync.bucket_bytes)
    parts = num_shards(sync, workers)
    buckets = tuple(
        Bucket(n, [named[place] for place in cut], 0 if n else NUM_SIGNALS, parts, allocate)
        for n, cut in enumerate(cuts)
    )
    places = {
        order[place]: (buckets[number], position)
        for number, cut in enumerate(cuts)
        for position, place in enumerate(cut)
    }
    frames = step_frames(workers=workers, num_buckets=len(cuts), has_buffers=has_buffers, sync=sync)
    return Arrangement(
        order=tuple(order),
        buckets=buckets,
        members=tuple(tuple(order[place] for place in cut) for cut in cuts),
        places=places,
        views={index: bucket.views[at] for index, (bucket, at) in places.items()},
        backward_names=tuple(f.name for f in frames if f.name.startswith("backward/")),
        exchange_names=tuple(f.name for f in frames if is_bucket_frame(f.name)),
    )


def sizes_of(parameters: Sequence[Named]) -> list[tuple[int, str]]:
    """Of each its bytes, and the kind of those that may share a bucket, as `cut_buckets` takes them."""
    return [(p.nbytes, f"{p.dtype} {p.device}") for _, p in parameters]


def expected_order(parameters: Sequence[Named], names: Sequence[str] | None) -> list[int]:
    """Positions by the names in which gradients are expected, then the others from the last one on."""
    index_of = {name: index for index, (name, _) in enumerate(parameters)}
    expected = [index_of[name] for name in names or () if name in index_of]
    # Backward mostly goes through modules the other way than they were registered.
    known = set(expected)
    return [*expected, *(i for i in reversed(range(len(parameters))) if i not in known)]


def agree_on_order(arrived: Sequence[int], before: Sequence[int], world: World) -> list[int]:
    """Worker 0's order, for all: gradients as they arrived there, then the others. Cost: one broadcast."""
    seen = set(arrived)
    order = [*arrived, *(index for index in before if index not in seen)]
    agreed = torch.tensor(order, dtype=torch.int64, device=world.device)
    with attendance.meeting("the broadcast of the order of gradients", world):
        dist.broadcast(agreed, group=world.group("data"), group_src=0)
    return agreed.tolist()
