"""Whole runs of workers that train alone between two exchanges: stopped, taken up again, put back."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ridgeline.errors import NonFiniteError, RidgelineError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime import checkpoint
from ridgeline.runtime.loop import train
from ridgeline.runtime.snapshot import Snapshot
from ridgeline.runtime.step import TrainStep
from ridgeline.runtime.sync.checkpointing import gathered, of_worker
from ridgeline.runtime.task import Task
from ridgeline.runtime.world import World

OPTIONS: dict[str, Any] = {"outer": "nesterov", "fragments": 2}


class StopHereError(RidgelineError):
    """Stands for a kill in the middle of a run."""


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def planned(every: int = 5, **sync: Any) -> Plan:
    sync = {"compression": "coarse", "options": OPTIONS, **sync}
    return Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(256, 1024), every=every, **sync))


def resumed(world: World, folder: Path) -> dict[str, Any]:
    """Whether runs that were stopped end with the bits of one that was not, by the step of the checkpoint."""
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    calls, stop_at = 0, 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise StopHereError("here")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = Task(
        name="tiny",
        model=net,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 0.01),
        train_data=TensorDataset(x, y),
        test_data=TensorDataset(x[:8], y[:8]),
        metric=lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).sum(),
        batch_size=4,
    )

    def run(name: str, *, resume: bool = False) -> None:
        options = {"epochs": 2, "seed": 5, "resume": resume, "checkpoint_every": 1}
        train(task, planned(), world, run_dir=folder / name, **options)  # type: ignore[arg-type]

    run("whole")
    equal: dict[str, bool] = {}
    for last in (1, 4, 5, 8):  # in a round, before and after an exchange, and of a later round
        calls, stop_at = 0, last + 1
        try:
            run(f"stopped {last}")
        except StopHereError:
            stop_at = 0
        run(f"stopped {last}", resume=True)
        ends = [
            max((folder / name / "checkpoints").glob("step-*"))
            for name in ("whole", f"stopped {last}")
        ]
        equal[str(last)] = stop_at == 0 and same(*ends)
    return {"equal": equal, "other workers": others(ends[0])}


def diverged(world: World, folder: Path) -> str:
    """What a worker is told where the parameters of the second one alone are no numbers any more."""
    calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if calls == 2 and world.rank == 1:  # the loss is finite, its gradient is not
            loss = loss + (0.0 * next(model.parameters()).sum()).sqrt()
        return loss

    x, y = torch.ones(16, 6), torch.zeros(16, dtype=torch.int64)
    task = Task(
        name="diverging",
        model=net,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        train_data=TensorDataset(x, y),
        test_data=TensorDataset(x, y),
        metric=lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).sum(),
        batch_size=4,
    )
    try:
        train(task, planned(), world, run_dir=folder / "diverged", epochs=1, checkpoint_every=2)
    except NonFiniteError as error:
        return str(error)
    return ""


def same(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bits of all workers."""
    contents = [checkpoint.content(path) for path in (one, other)]
    return one.name == other.name and all(
        contents[0][part].keys() == contents[1][part].keys()
        and all(
            torch.equal(value, contents[1][part][name]) for name, value in contents[0][part].items()
        )
        for part in (0, 1)
    )


def others(path: Path) -> bool:
    """Whether the second worker's parameters in a checkpoint are its own."""
    model, training, _ = checkpoint.content(path)
    return not torch.equal(model["0.weight"], training["own.1.state.model.0.weight"])


def put_back(world: World) -> dict[str, bool]:
    """What a snapshot and a checkpoint do with what was common, in the middle of a round."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [
        torch.randn(8, 6, generator=torch.Generator().manual_seed(world.rank + 2 * n))
        for n in range(9)
    ]

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    with TrainStep(model, forward, optimizer, planned(every=4), device="cpu") as step:
        for batch in batches[:5]:
            step(batch)
        synchronizer = step.synchronizer
        assert synchronizer is not None
        before = {name: value.clone() for name, value in synchronizer.state_dict().items()}
        snapshot = Snapshot(model, optimizer, None, synchronizer)
        all_states = gathered(synchronizer, world)
        runs = []
        for _ in range(2):
            for batch in batches[5:]:
                step(batch)
            runs.append([p.detach().clone() for p in model.parameters()])
            changed = {name: value.clone() for name, value in synchronizer.state_dict().items()}
            snapshot.restore()
        mine = of_worker(all_states, world.rank)
        restored = synchronizer.state_dict()
    kinds = {name.split(".")[0] for name in before}
    return {
        "kinds": kinds == {"local_steps", "common", "outer_momentum", "residual"},
        "moved": all(
            any(not torch.equal(before[n], changed[n]) for n in before if n.startswith(kind))
            for kind in kinds
        ),
        "restored": all(torch.equal(before[n], restored[n]) for n in before),
        "repeated": all(map(torch.equal, *runs)),
        "gathered": all(torch.equal(mine[n], before[n]) for n in before)
        if world.rank == 0
        else not mine,
    }
