"""Whole runs of workers that train alone between two exchanges: stopped, taken up again, put back."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import stopped_runs
import torch
from stopped_runs import cross_entropy, last_checkpoint, tiny_task
from torch import Tensor, nn

from ridgeline.errors import NonFiniteError, WorkloadError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.checkpoints import checkpoint
from ridgeline.runtime.checkpoints.checkpointing import gathered, of_worker
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.training.loop import train
from ridgeline.state.snapshot import Snapshot
from ridgeline.workers.world import World

KINDS = "local_steps", "common", "outer_momentum", "residual"
STOPS = 1, 4, 5, 8
"""In a round, before and after an exchange, and of a later round."""
OPTIONS: dict[str, Any] = {"outer": "nesterov", "fragments": 2}


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def planned(every: int = 5, **sync: Any) -> Plan:
    sync = {"compression": "coarse", "options": OPTIONS, **sync}
    return Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(256, 1024), every=every, **sync))


DELAYED = planned(compression="none", options={"fragments": 2, "delay": 2})
"""Fragments leave after steps 3 and 5 of each round, and arrive two steps later."""
ENCODED = planned(options={"fragments": 2, "delay": 2})
"""Likewise, by a codec that remembers what it left out."""


def resumed(
    world: World, folder: Path, plan: Plan | None = None, stops: tuple[int, ...] = STOPS
) -> dict[str, Any]:
    """Whether runs that were stopped end with the bits of one that was not, by the step of the checkpoint."""
    found = stopped_runs.resumed(
        world,
        folder,
        plan or planned(),
        net,
        lambda model: torch.optim.AdamW(model.parameters(), 0.01),
        stops=stops,
        checkpoint_every=1,
    )
    return {
        "equal": {str(last): told["was_stopped"] and told["equal"] for last, told in found.items()},
        "other workers": others(last_checkpoint(folder / "whole")),
    }


def diverged(world: World, folder: Path) -> str:
    """What a worker is told where the parameters of the second one alone are no numbers any more."""
    calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = cross_entropy(model, batch)
        if calls == 2 and world.rank == 1:  # the loss is finite, its gradient is not
            loss = loss + (0.0 * next(model.parameters()).sum()).sqrt()
        return loss

    task = tiny_task(net, lambda model: torch.optim.SGD(model.parameters(), 0.1), loss_fn, 16)
    try:
        train(task, planned(), world, run_dir=folder / "diverged", epochs=1, checkpoint_every=2)
    except NonFiniteError as error:
        return str(error)
    return ""


def beside(world: World) -> list[str]:
    """What steps of the same parameters are told beside one that trains apart, and once that is closed."""
    model, told = nn.Linear(6, 3), list[str]()
    batch = torch.full((2, 6), 1.0 + world.rank), torch.tensor([0, 1])
    first, *others = (
        PlannedStep(
            model,
            cross_entropy,
            torch.optim.SGD(model.parameters(), 0.1),
            planned(options={}),
            device="cpu",
        )
        for _ in range(3)
    )
    first(batch)
    for step in others:
        try:
            step(batch)
        except WorkloadError as error:
            told.append(str(error))
        first.close()
        step.close()
    return told


def others(path: Path) -> bool:
    """Whether the second worker's parameters in a checkpoint are its own."""
    model, training, _ = checkpoint.content(path)
    return not torch.equal(model["0.weight"], training["own.1.state.model.0.weight"])


def put_back(
    world: World, plan: Plan | None = None, wanted: Collection[str] = KINDS
) -> dict[str, bool]:
    """What a snapshot and a checkpoint do with what was common, in the middle of a round."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [
        torch.randn(8, 6, generator=torch.Generator().manual_seed(world.rank + 2 * n))
        for n in range(10)
    ]

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with PlannedStep(model, forward, optimizer, plan or planned(every=4), device="cpu") as step:
        for batch in batches[:6]:
            step(batch)
        synchronizer = step.synchronizer
        assert synchronizer is not None
        before = {name: value.clone() for name, value in synchronizer.state_dict().items()}
        snapshot = Snapshot(model, optimizer, None, synchronizer)
        all_states = gathered(synchronizer, world)
        runs = []
        for _ in range(2):
            for batch in batches[6:]:
                step(batch)
            runs.append([p.detach().clone() for p in model.parameters()])
            changed = {name: value.clone() for name, value in synchronizer.state_dict().items()}
            snapshot.restore()
        mine = of_worker(all_states, world.rank)
        restored = synchronizer.state_dict()
    kinds = {name.split(".")[0] for name in before}
    return {
        "kinds": kinds == set(wanted),
        "moved": all(
            any(
                not torch.equal(before[n], changed[n])
                for n in before
                if n.startswith(kind) and n in changed
            )
            for kind in kinds
        ),
        "restored": all(torch.equal(before[n], restored[n]) for n in before),
        "repeated": all(map(torch.equal, *runs)),
        "gathered": all(torch.equal(mine[n], before[n]) for n in before)
        if world.rank == 0
        else not mine,
    }
