"""One worker of several that train a compiled step whose gradients leave early; run by torchrun.

    early_program.py OUTPUT EXECUTION [careless]

Worker 0 writes how far its parameters are from those of the eager step, relative to their change, and the
frames of the last replay. `careless` lets every gradient claim to be ready when the first one is.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.capture import ready
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tasks.resnet18 import ResNet18
from ridgeline.workers.world import World

NUM_STEPS = 20


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(execution: Execution, world: World) -> tuple[list[Tensor], PlannedStep]:
    """The parameters after some steps, in double precision: a sum too early is wrong by far more than rounding."""
    torch.manual_seed(0)
    model = ResNet18(10).to(device=world.device, dtype=torch.float64)
    # A captured optimizer reads its rate as float32, in which this one is exact.
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-10)
    generator = torch.Generator().manual_seed(world.rank)
    plan = Plan(execution=execution, workers=world.size, sync=Sync(bucket_bytes=(8 << 20,)))
    step = PlannedStep(model, loss_fn, optimizer, plan)
    for _ in range(NUM_STEPS):
        x = torch.randn(8, 1, 16, 16, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 10, (8,), generator=generator)
        step((x.to(world.device), y.to(world.device)))
    return [parameter.detach().clone() for parameter in model.parameters()], step


def be_careless() -> None:
    """Every result tells the event of the first one."""
    careful = ready.look_up

    def careless(gradient: Tensor) -> ready.Ready | None:
        found = careful(gradient)
        first = next(iter(ready._results.values()), None)
        return found and first and found._replace(event=first.event)

    ready.look_up = careless


def main() -> None:
    output, execution, *careless = sys.argv[1:]
    world = World.join()
    torch.manual_seed(0)
    begin = [p.to(world.device) for p in ResNet18(10).double().parameters()]
    want, step = train("eager", world)
    step.close()
    if careless:
        be_careless()
    got, step = train(execution, world)  # type: ignore[arg-type]
    change = max(float((a - b).abs().max()) for a, b in zip(want, begin, strict=True))
    gap = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) / change
    frames = {s.name: (s.start_ns, s.end_ns) for s in step.timeline().frames}
    gaps = torch.tensor([gap], device=world.device, dtype=torch.float64)
    dist.all_reduce(gaps, op=dist.ReduceOp.MAX)
    step.close()
    World.leave()
    if world.rank == 0:
        Path(output).write_text(json.dumps({"gap": float(gaps), "frames": frames}))


if __name__ == "__main__":
    main()
