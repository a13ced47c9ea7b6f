"""Whole runs that are stopped and taken up again, beside one that is not."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan
from ridgeline.runtime.checkpoints import checkpoint
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.task import Task
from ridgeline.workers.world import World

Losses = Callable[[nn.Module, Any], Tensor]


class StopHereError(RidgelineError):
    """Stands for a kill in the middle of a run."""


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def tiny_task(
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss_fn: Losses,
    samples: int,
    *,
    shape: tuple[int, ...] = (6,),
    classes: int = 3,
) -> Task:
    """A task of random numbers, of one shape for each sample, in batches of four."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, *shape, generator=generator)
    y = torch.randint(0, classes, (samples,), generator=generator)
    return Task(
        name="tiny",
        model=model,
        loss_fn=loss_fn,
        optimizer=optimizer,
        train_data=TensorDataset(x, y),
        test_data=TensorDataset(x[:8], y[:8]),
        metric=lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).sum(),
        batch_size=4,
    )


def stopping_loss() -> tuple[Losses, Callable[[int], None]]:
    """Cross entropy that stands for a kill in one call, and what says in which from now on; 0: in none."""
    calls = stop_at = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise StopHereError("here")
        return cross_entropy(model, batch)

    def stop(call: int) -> None:
        nonlocal calls, stop_at
        calls, stop_at = 0, call

    return loss_fn, stop


def resumed(
    world: World,
    folder: Path,
    plan: Plan,
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    stops: Sequence[int],
    checkpoint_every: int,
) -> dict[int, dict[str, Any]]:
    """Whether runs that were stopped after some step end with the bits of one that was not, by that step."""
    loss_fn, stop = stopping_loss()
    task = tiny_task(model, optimizer, loss_fn, 48)

    def run(name: str, *, resume: bool = False) -> None:
        options = {"epochs": 2, "seed": 5, "resume": resume, "checkpoint_every": checkpoint_every}
        train(task, plan, world, run_dir=folder / name, **options)  # type: ignore[arg-type]

    run("whole")
    found: dict[int, dict[str, Any]] = {}
    for last in stops:
        was_stopped = False
        stop(last + 1)
        try:
            run(f"stopped {last}")
        except StopHereError:
            was_stopped = True
        stop(0)
        run(f"stopped {last}", resume=True)
        ends = [last_checkpoint(folder / name) for name in ("whole", f"stopped {last}")]
        steps = [end.name for end in ends]
        found[last] = {"equal": same(*ends), "steps": steps, "was_stopped": was_stopped}
    return found


def last_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step-*"))


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
