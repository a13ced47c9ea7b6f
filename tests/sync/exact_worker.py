"""Four workers over gloo: means by each transport, of cases that come as lines of JSON; a line of answers each.

torchrun --nproc-per-node 4 exact_worker.py

Two and three workers are groups of the four; see `answering`.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.loading import make_transport
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.workers import flat_collectives
from ridgeline.workers.world import World

sys.path.append(str(Path(__file__).parents[1]))

from answering import serve

STEPS = 10
Known = dict[str, Transport]


def values_of(rank: int, seed: int, numel: int, dtype: str) -> Tensor:
    """What the worker of that rank begins with; large and small numbers, of both signs."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    exponents = torch.randint(-6, 6, (numel,), generator=generator, dtype=torch.float64)
    normal = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (normal * exponents.exp2()).to(getattr(torch, dtype))


def transport_of(world: World, case: dict[str, Any], known: Known) -> Transport:
    key = json.dumps([world.size, case["algorithm"], case["options"]])
    if key not in known:
        sync = Sync(algorithm=case["algorithm"], options=case["options"])
        known[key] = make_transport(sync, world)
    return known[key]


def mean(world: World, case: dict[str, Any], known: Known) -> dict[str, Any]:
    """The bits of a mean, as a string; a bucket's payload, or bare values."""
    transport = transport_of(world, case, known)
    values = values_of(world.rank, case["seed"], case["numel"], case["dtype"])
    if not case["bucket"]:
        transport.mean(values)
        return {"bits": bits(values)}
    parameter = nn.Parameter(torch.zeros(case["numel"], dtype=values.dtype))
    bucket = Bucket(0, [("p", parameter)])
    transport.arranged((bucket,))
    transport.sent_bytes = 0
    parameter.grad = values
    bucket.store(0, transport.scale)
    behind = bucket.behind.fill_(float(world.rank)).clone()
    assert transport.reduce(bucket) is None
    transport.settle(bucket)
    assert torch.equal(bucket.behind, behind), "what is behind the payload is not the transport's"
    told = {"bits": bits(bucket.payload[: case["numel"]]), "sent_bytes": transport.sent_bytes}
    return {**told, "payload": bucket.payload.numel()}


def bits(values: Tensor) -> str:
    return values.contiguous().view(torch.uint8).numpy().tobytes().hex() if values.numel() else ""


class Net(nn.Module):
    """Three layers, of which the second is used where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, *, deep: bool = True) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(self.second(hidden).relu() if deep else hidden)


def trained(world: World, case: dict[str, Any], _: Known) -> dict[str, Any]:
    """Parameters after some steps; `skips` says who skips a layer: `nobody`, the `last` worker or `all`."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sync = Sync(algorithm=case["algorithm"], options=case["options"], bucket_bytes=(256, 1024))
    rank, size, group = world.rank, world.size, world.process_group
    plan = Plan(workers=size, threads=1, sync=sync)
    skips = case["skips"] == "all" or (case["skips"] == "last" and rank == size - 1)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0], deep=not skips), batch[1])

    generator = torch.Generator().manual_seed(1 + rank)
    with PlannedStep(model, loss_fn, optimizer, plan, device="cpu", process_group=group) as step:
        synchronizer: Any = step.synchronizer
        overheads = []
        for _ in range(STEPS):
            x = torch.randn(8, 6, generator=generator)
            step((x, torch.randint(0, 3, (8,), generator=generator)))
            overheads.append(synchronizer.overhead_ns)
        payloads = [bucket.payload.numel() for bucket in synchronizer.buckets]
        frames = [span.name for span in step.timeline().frames]
    return {
        "parameters": [p.detach().flatten().tolist() for p in model.parameters()],
        "unused": model.second.weight.grad is None,
        "payloads": payloads,
        "sent_bytes": synchronizer._transport.sent_bytes,
        "frames": frames,
        "least_overhead_ns": min(overheads),
    }


def refused(world: World, case: dict[str, Any], _: Known) -> dict[str, Any]:
    """What making the transport says."""
    try:
        transport_of(world, case, {})
    except RidgelineError as error:
        return {"message": f"{type(error).__name__}: {error}"}
    return {"message": ""}


def shares(world: World, case: dict[str, Any], _: Known) -> dict[str, Any]:
    """What this worker has of the others after an all-to-all and two all-gathers, one of them in place."""
    size, numel = world.size, case["numel"]
    mine = values_of(world.rank, case["seed"], size * numel, case["dtype"])
    found, whole, place = torch.empty_like(mine), torch.empty_like(mine), mine.clone()
    flat_collectives.all_to_all(found, mine, world.group())
    share = mine[world.rank * numel : (world.rank + 1) * numel]
    flat_collectives.all_gather(whole, share, world.group())
    own = place[world.rank * numel : (world.rank + 1) * numel]
    flat_collectives.all_gather(place, own, world.group())
    return {"all_to_all": bits(found), "all_gather": bits(whole), "in_place": bits(place)}


KINDS: dict[str, Callable[[World, dict[str, Any], Known], dict[str, Any]]] = {
    "mean": mean,
    "trained": trained,
    "refused": refused,
    "shares": shares,
}


def main() -> None:
    known: Known = {}
    serve(lambda world, case: KINDS[case["kind"]](world, case, known))


if __name__ == "__main__":
    main()
