"""Worker script: trains a small model; across hosts it measures them as well, and predicts a step.

    torchrun ... trained_across.py DIRECTORY [measure]

Every worker writes `RANK.json`.
"""

import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.workers.world import World

STEPS = 6
TIMED_STEPS = 7
WIDTH = 512
"""About a megabyte of gradients a layer: on a slow link a step is mostly communication."""


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(rank: int, step: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    images = torch.randn(16, width, generator=generator)
    return images, torch.randint(0, 10, (16,), generator=generator)


def made(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(world: World) -> dict[str, Any]:
    """The losses of a few steps, and the bits of the parameters after them."""
    model, optimizer = made(64)
    plan = rl.Plan(workers=2, sync=rl.Sync(bucket_bytes=(8 << 10,)))
    with rl.TrainStep(model, loss_fn, optimizer, plan) as step:
        losses = [float(step(batch_of(world.rank, i, 64))) for i in range(STEPS)]
    bits = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    return {"losses": losses, "bits": bits.hexdigest()}


def measured(world: World) -> dict[str, Any]:
    """What the group's all-reduce takes by size, and the step of an exact plan, predicted and measured."""
    model, optimizer = made(WIDTH)
    batches = [batch_of(world.rank, i, WIDTH) for i in range(TIMED_STEPS)]
    workload = rl.trace(model, loss_fn, optimizer, batches[0])
    machine = rl.measure(workload=workload)
    fixed = {"execution": "eager", "threads": 1}
    plan = rl.choose(machine, workload, world_size=world.size, fixed=fixed).best.plan
    seconds = []
    with rl.TrainStep(model, loss_fn, optimizer, plan) as step:
        for _ in range(4):  # buckets are cut again after the first
            step(batches[0])
        for one in batches:
            dist.barrier(group=world.group())
            begin = time.perf_counter()
            step(one)
            seconds.append(time.perf_counter() - begin)
    table = next(c.table for c in machine.collectives if c.operation == "all_reduce")
    return {
        "all_reduce": [(point.num_bytes, point.seconds.value) for point in table],
        "predicted_s": rl.simulate(machine, workload, plan).step_ns * 1e-9,
        "measured_s": statistics.median(seconds),
        "plan": repr(plan),
        "exact": plan.exact,
    }


def main() -> None:
    world = World.join(threads=1, device="cpu")
    found = trained(world)
    if "measure" in sys.argv:
        found |= measured(world)
    (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
