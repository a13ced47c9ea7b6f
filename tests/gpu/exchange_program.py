"""One of two workers that train with every way to exchange gradients that GPUs are offered; run by torchrun.

    exchange_program.py OUTPUT

Worker 0 writes, for each algorithm and each compression, operator by operator and in a graph: how far the
parameters are from those of the all-reduce relative to their size, and whether all workers hold the same bits.
Of parameters whose means travel beside steps: how far each worker's are from those that were made by hand.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.errors import RidgelineError
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.synchronisation import (
    ALGORITHMS,
    DEFAULT_ALGORITHM,
    UNCOMPRESSED,
    offered,
    offered_compressions,
)
from ridgeline.workers.world import World

sys.path.append(str(Path(__file__).parents[1] / "sync"))

NUM_STEPS = 10
EVERY, DELAY = 4, 2
LATE = "late means"
EXECUTIONS: tuple[Execution, ...] = ("eager", "graph")
APART: tuple[Execution, ...] = ("eager", "compiled")
"""Modes in which workers may train alone between two exchanges."""


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch) - batch[:, :8]).square().mean()


def fresh(world: World) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)]
    return nn.Sequential(*layers).to(world.device)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def batches(world: World, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(32, 64, generator=generator).to(world.device) for _ in range(NUM_STEPS)]


def trained(world: World, sync: Sync, execution: Execution) -> list[Tensor]:
    """Parameters after some steps."""
    model = fresh(world)
    plan = Plan(execution=execution, workers=world.size, sync=sync)
    with PlannedStep(model, mean_square, optimizer_of(model), plan) as step:
        for batch in batches(world, world.rank):
            step(batch)
        return [parameter.detach().clone() for parameter in model.parameters()]


def late_by_hand(world: World) -> list[Tensor]:
    """This worker's parameters where every mean is half of them from some steps after it was made."""
    common = fresh(world)
    models = [copy.deepcopy(common) for _ in range(world.size)]
    optimizers = [optimizer_of(model) for model in models]
    data = [batches(world, rank) for rank in range(world.size)]
    means: list[Tensor] = []
    for number in range(1, NUM_STEPS + 1):
        for model, optimizer, mine in zip(models, optimizers, data, strict=True):
            optimizer.zero_grad()
            mean_square(model, mine[number - 1]).backward()
            optimizer.step()
        each = list(zip(*(model.parameters() for model in models), strict=True))
        with torch.no_grad():
            if number % EVERY == 0:
                means = [torch.stack(mine).double().mean(0) for mine in each]
            if means and number % EVERY == DELAY:
                for mean, mine in zip(means, each, strict=True):
                    for parameter in mine:
                        parameter.copy_((parameter.double() + mean) / 2)
    return [parameter.detach() for parameter in models[world.rank].parameters()]


def late(
    world: World, execution: Execution, wanted: list[Tensor], compression: str = UNCOMPRESSED
) -> dict[str, Any]:
    """How far parameters are from those by hand, of the worker where they are farthest."""
    options = {"delay": DELAY}
    sync = Sync(compression=compression, bucket_bytes=(1 << 16,), every=EVERY, options=options)
    found = trained(world, sync, execution)
    flat, reference = (torch.cat([p.flatten() for p in ps]) for ps in (found, wanted))
    farthest = (flat - reference).norm() / reference.norm()
    dist.all_reduce(farthest, dist.ReduceOp.MAX)
    return {"gap": float(farthest), "same": True}


def told(world: World, sync: Sync, execution: Execution, wanted: list[Tensor]) -> dict[str, Any]:
    """What became of one way, or why it is refused."""
    try:
        found = trained(world, sync, execution)
    except RidgelineError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    flat, reference = (torch.cat([p.flatten() for p in ps]) for ps in (found, wanted))
    others = [torch.empty_like(flat) for _ in range(world.size)]
    dist.all_gather(others, flat)
    torch.manual_seed(0)
    gap = float((flat - reference).norm() / reference.norm())
    return {"gap": gap, "same": all(torch.equal(flat, other) for other in others)}


def main() -> None:
    import toy_codec
    import toy_transport

    world = World.join()
    ways = {
        name: Sync(algorithm=name, bucket_bytes=(1 << 16,))
        for name in offered("cuda")
        if world.size >= ALGORITHMS[name].least_workers
    }
    ways |= {
        name: Sync(compression=name, bucket_bytes=(1 << 16,))
        for name in offered_compressions("cuda")
        if name != UNCOMPRESSED
    }
    wanted = trained(world, ways[DEFAULT_ALGORITHM], "eager")
    found: dict[str, Any] = {"toys": [toy_codec.__name__, toy_transport.__name__]}
    for name, sync in ways.items():
        entry = ALGORITHMS.get(name)
        for execution in EXECUTIONS:
            if execution != "eager" and entry is not None and entry.shards_update:
                continue  # refused by name: no update that is divided among workers is captured
            found[f"{name} / {execution}"] = told(world, sync, execution, wanted)
            if world.rank == 0:
                Path(sys.argv[1]).write_text(json.dumps(found))
    by_hand = late_by_hand(world)
    found |= {f"{LATE} / {execution}": late(world, execution, by_hand) for execution in APART}
    # On a GPU codecs are kernels, on the stream that continues beside steps.
    found |= {
        f"{name} / late": late(world, "eager", by_hand, name)
        for name in offered_compressions("cuda")
        if name != UNCOMPRESSED
    }
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
