"""One of two workers that train with every way to exchange gradients that GPUs are offered; run by torchrun.

    exchange_program.py OUTPUT

Worker 0 writes, for each algorithm and each compression, operator by operator and in a graph: how far the
parameters are from those of the all-reduce relative to their change, and whether all workers hold the same bits.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.errors import RidgelineError
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.runtime.step import TrainStep
from ridgeline.runtime.world import World
from ridgeline.synchronisation import (
    ALGORITHMS,
    DEFAULT_ALGORITHM,
    UNCOMPRESSED,
    offered,
    offered_compressions,
)

sys.path.append(str(Path(__file__).parents[1] / "sync"))

NUM_STEPS = 10
EXECUTIONS: tuple[Execution, ...] = ("eager", "graph")


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch) - batch[:, :8]).square().mean()


def trained(world: World, sync: Sync, execution: Execution) -> list[Tensor]:
    """Parameters after some steps."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)]
    model = nn.Sequential(*layers).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    plan = Plan(execution=execution, workers=world.size, sync=sync)
    generator = torch.Generator().manual_seed(1 + world.rank)
    with TrainStep(model, mean_square, optimizer, plan) as step:
        for _ in range(NUM_STEPS):
            step(torch.randn(32, 64, generator=generator).to(world.device))
        return [parameter.detach().clone() for parameter in model.parameters()]


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
    World.leave()


if __name__ == "__main__":
    main()
