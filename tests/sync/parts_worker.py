"""Two workers over gloo: compiled steps in parts, beside eager ones, and the order of what happens in them.

torchrun --nproc-per-node 2 parts_worker.py OUTPUT

Every worker compares; worker 0 writes, by case, the largest relative gap of all, and what the last step did.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ridgeline.plan import Execution, Plan, Sync
from ridgeline.programs.compiling import WholeForm
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.sync.collectives import Collectives
from ridgeline.workers.world import World

WIDTH = 16
STEPS = 4
LAYER_BYTES = 8 * (WIDTH * WIDTH + WIDTH)
WHOLE = 1 << 20


class Net(nn.Module):
    """Layers of one size with normalisation between them; the last shares its weight with the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.layers[1].weight
        self.layers[2].weight.requires_grad_(False)

    def forward(self, x: Tensor, *, recomputes: bool = False) -> Tensor:
        for index, layer in enumerate(self.layers):
            call = layer.__call__
            x = checkpoint(call, x, use_reentrant=False) if recomputes and index == 1 else call(x)
            x = torch.tanh(self.norm(x) if index == 2 else x)
        return self.tied(x)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def recomputing(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch, recomputes=True).square().mean()


def programs(loss: Tensor) -> list[Any]:
    """Autograd's nodes of compiled programs, in the order in which the forward pass ran them."""
    found: list[Any] = []
    left: list[Any] = [loss.grad_fn]
    seen = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().startswith("CompiledFunction"):
            found.append(node)
        left += [after for after, _ in node.next_functions]
    return found[::-1]


def train(
    execution: Execution,
    limits: tuple[int, ...],
    loss: Callable[..., Tensor],
    accumulate: int,
    world: World,
) -> tuple[list[Tensor], list[str], list[str]]:
    """Parameters and buffers after some steps, what happened in the last of them, and notes."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9
    )
    sync = Sync(bucket_bytes=limits)
    plan = Plan(execution=execution, workers=2, threads=1, accumulate=accumulate, sync=sync)
    events: list[str] = []
    called, run = WholeForm.__call__, Collectives.run

    def told_call(self: WholeForm, model: nn.Module, batch: Any) -> Tensor:
        found = called(self, model, batch)
        for index, node in enumerate(programs(found)):
            node.register_prehook(lambda _, index=index: events.append(f"backward of part {index}"))
        return found

    def told_run(self: Collectives, name: str, *rest: Any) -> None:
        events.append(name)
        run(self, name, *rest)

    generator = torch.Generator().manual_seed(world.rank)
    with (
        mock.patch.object(WholeForm, "__call__", told_call),
        mock.patch.object(Collectives, "run", told_run),
        PlannedStep(model, loss, optimizer, plan, device="cpu") as step,
    ):
        for _ in range(STEPS):
            events.clear()
            step(torch.randn(8, WIDTH, generator=generator, dtype=torch.float64))
        notes = list(step.notes)
    return [value.detach().clone() for value in model.state_dict().values()], events, notes


def case(
    limits: tuple[int, ...], loss: Callable[..., Tensor], accumulate: int, world: World
) -> dict[str, Any]:
    want, _, _ = train("eager", limits, loss, accumulate, world)
    got, events, notes = train("compiled", limits, loss, accumulate, world)
    gap = max(float(((a - b).abs() / (1 + a.abs())).max()) for a, b in zip(want, got, strict=True))
    gaps = torch.tensor([gap], dtype=torch.float64)
    dist.all_reduce(gaps, op=dist.ReduceOp.MAX)
    return {"gap": float(gaps), "events": events, "notes": notes}


def main() -> None:
    world = World.join(device="cpu")
    each = (LAYER_BYTES,)
    told = {
        "a part a layer": case(each, loss_fn, 1, world),
        "two micro-batches": case(each, loss_fn, 2, world),
        "one bucket": case((WHOLE,), loss_fn, 1, world),
        "recomputed": case(each, recomputing, 1, world),
    }
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
