"""Cases of `local_cases.py`: exchanges that a trial holds back and lets go, and state that all have already."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.plan import Plan, Sync
from ridgeline.runtime.layout import initial_state
from ridgeline.runtime.layout.same_state import checksums
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World

HELD_STEPS = 7
SIZES = (4, 24, 8)


def made(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, 4, bias=False) for width in SIZES))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    total = torch.zeros(())
    for layer in model.children():
        total = total + layer(batch[:, : layer.in_features]).square().mean()  # type: ignore[index]
    return total


def same_layers(model: nn.Module, world: World) -> list[int]:
    """The layers whose parameters have the same bits on all workers."""
    told = gather_bytes(repr(checksums(list(model.parameters()))).encode(), world)
    rows = [row.decode().strip("[]").split(", ") for row in told]
    return [place for place, sums in enumerate(zip(*rows, strict=True)) if len(set(sums)) == 1]


def held(world: World) -> dict[str, Any]:
    """Which layers are the same after each step, held and let go; the share that was told, and exchanges."""
    found: dict[str, Any] = {"same": [], "exchanges": []}
    model = made(0)
    plan = Plan(
        workers=2, threads=1, sync=Sync(every=3, options={"fragments": 3}, bucket_bytes=(64,))
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(world.rank)
    with PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        step.hold_exchanges()
        for number in range(HELD_STEPS + 3):
            if number == HELD_STEPS:
                found["share"] = step.release_exchange()
            step(torch.randn(8, max(SIZES), generator=generator))
            found["same"].append(same_layers(model, world))
            found["exchanges"].append(step.synchronizer.num_exchanges)  # type: ignore[union-attr]
    return found


def begun(world: World) -> dict[str, Any]:
    """Broadcasts of parameters where all workers begin alike, and where they do not; all begin alike then."""
    found: dict[str, Any] = {}
    broadcast, count = dist.broadcast, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return broadcast(*arguments, **named)

    for name, seed in (("alike", 0), ("apart", world.rank)):
        count, model = 0, made(seed)
        dist.broadcast = counted
        try:
            initial_state.take_initial_state(model, world)
        finally:
            dist.broadcast = broadcast
        found[name] = count, len(same_layers(model, world))
    return found
