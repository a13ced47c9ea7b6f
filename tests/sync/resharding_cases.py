"""Worker script: runs of one to three workers that others of one to three go on with.

    torchrun.py 3 resharding_cases.py DIRECTORY

Gradients are whole numbers that three workers divide without rounding, whatever the order of additions is. So
all runs take the same steps to the bit, and differ only in who holds what.
"""

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from stopped_runs import StopHereError, last_checkpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ridgeline.plan import Plan, Sync
from ridgeline.runtime.checkpoints import checkpoint
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.task import Task
from ridgeline.workers.world import World

STOP_AT = 4
DIVISIBLE = 12
"""By one, two and three workers, and by the samples of each of them."""


class Way(NamedTuple):
    """How a run is trained."""

    workers: int
    algorithm: str

    def __str__(self) -> str:
        return f"{self.workers} {self.algorithm}"


WAYS = (Way(1, "all_reduce"), *(Way(n, a) for n in (2, 3) for a in ("all_reduce", "sharded")))

CHANGES = ((3, 2), (2, 3), (2, 2))
"""Numbers of workers that begin a run with compressed gradients, and of those that continue it."""


class Weighted(nn.Module):
    """Parameters of several shapes, cut elsewhere for any number of workers, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.some = nn.Parameter(torch.randn(3, 67)), nn.Parameter(torch.randn(3))
        self.one = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.wide).sum(1) + (x * self.some).sum(1) + x[:, 0] * self.one


def task_that_stops(at: int = 0) -> Task:
    """48 samples in batches of 12, and a loss that stands for a kill in one call; 0: in none."""
    calls = 0

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at:
            raise StopHereError("here")
        # The mean of a linear model, divided where that is exact: a twelfth is no float, and kernels that
        # multiply and add at once would carry what it lacks into sums, by some order of their own.
        return model(batch[0] / len(batch[0])).sum()

    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-9, 9, (48, 3), generator=generator) * float(DIVISIBLE)
    return Task(
        name="divided",
        model=Weighted,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 0.01, amsgrad=True),
        train_data=TensorDataset(x),
        test_data=TensorDataset(x[:DIVISIBLE]),
        metric=lambda model, batch: (model(batch[0]) > 0).sum(),
        batch_size=DIVISIBLE,
    )


def linear_task(at: int = 0) -> Task:
    """As `task_that_stops`, of gradients that depend on nothing but the samples, and plain steps."""
    task = task_that_stops(at)
    x = torch.randn(48, 3, generator=torch.Generator().manual_seed(7))
    return dataclasses.replace(
        task,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 1.0),
        train_data=TensorDataset(x),
    )


def left_behind(begun: int, then: int, run_dir: Path, worlds: dict[int, World]) -> dict[str, Any]:
    """How far a compressed run that others continue ends from a plain one, beside what was left out."""
    sync = Sync(compression="topk", options={"density": 0.1}, bucket_bytes=(300,))
    options: dict[str, Any] = {"epochs": 2, "seed": 5, "checkpoint_every": 1}
    for workers, at in ((begun, STOP_AT), (then, 0)):
        if workers in worlds:
            plan = Plan(workers=workers, threads=1, sync=sync)
            with contextlib.suppress(StopHereError):
                train(
                    linear_task(at),
                    plan,
                    worlds[workers],
                    run_dir=run_dir,
                    resume=not at,
                    **options,
                )
        dist.barrier()
    if 1 in worlds:
        train(linear_task(), Plan(threads=1), worlds[1], run_dir=run_dir / "plain", **options)
    dist.barrier()
    if 1 not in worlds:
        return {}
    ends = [checkpoint.content(last_checkpoint(folder)) for folder in (run_dir, run_dir / "plain")]
    (model, training, _), (plain, _, _) = ends
    gaps, residuals = [], []
    for name in ("wide", "some", "one"):
        left = [training[f"sync.{rank}.residual.{name}"].double() for rank in range(then)]
        residual = sum(left, torch.zeros(())) / then
        ahead = model[name].double() - plain[name].double()
        gaps.append(float((ahead - residual).abs().max()))
        residuals.append(float(residual.abs().max()))
    return {"gap": max(gaps), "left": max(residuals)}


def rounding_task(at: int = 0) -> Task:
    """As `task_that_stops`, of gradients that every order of additions rounds otherwise."""
    task = linear_task(at)
    weigh = task.loss_fn
    return dataclasses.replace(
        task,
        loss_fn=lambda model, batch: weigh(model, batch) + (batch[0] @ model.wide).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    )


def rounded(algorithm: str, folder: Path, world: World) -> list[str]:
    """What a run of three workers ends with otherwise where it was stopped and resumed."""
    plan = Plan(workers=3, threads=1, sync=Sync(algorithm=algorithm, bucket_bytes=(150, 600)))
    options: dict[str, Any] = {"epochs": 2, "seed": 5, "checkpoint_every": 1}
    for name, at, resume in (("whole", 0, False), ("parts", STOP_AT, False), ("parts", 0, True)):
        with contextlib.suppress(StopHereError):
            train(rounding_task(at), plan, world, run_dir=folder / name, resume=resume, **options)
        dist.barrier()
    whole, parts = content(folder / "whole"), content(folder / "parts")
    return [key for key in {*whole, *parts} if whole.get(key) != parts.get(key)]


def trained(
    way: Way, run_dir: Path, world: World, *, stop_at: int = 0, resume: bool = False
) -> None:
    """Two epochs, or fewer, with a checkpoint after every step."""
    buckets = (2000,) if resume else (150, 600)
    plan = Plan(
        workers=way.workers,
        threads=1,
        sync=Sync(algorithm=way.algorithm, bucket_bytes=buckets),
    )
    options: dict[str, Any] = {"epochs": 2, "seed": 5, "resume": resume, "checkpoint_every": 1}
    was_stopped = False
    try:
        train(task_that_stops(stop_at), plan, world, run_dir=run_dir, **options)
    except StopHereError:
        was_stopped = True
    assert was_stopped == bool(stop_at)


def content(run_dir: Path) -> dict[str, Any]:
    """What does not depend on the number of workers in the last checkpoint of a run."""
    path = last_checkpoint(run_dir)
    _, model, training, state = checkpoint.read(path)
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    tensors |= {n: t for n, t in training.items() if not n.startswith("random.")}
    settings = {"step": path.name, "groups": state["optimizer"]["param_groups"]}
    return {**settings, **{name: tensor.tolist() for name, tensor in tensors.items()}}


def main() -> None:
    folder = Path(sys.argv[1])
    rank = World.join(threads=1, device="cpu").rank
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    worlds = {
        size: World.join(threads=1, device="cpu", process_group=group)
        for size, group in groups.items()
        if rank < size
    }
    found = {}
    for way in WAYS:
        if rank < way.workers:
            trained(way, folder / f"whole {way}", worlds[way.workers])
            trained(way, folder / f"stopped {way}", worlds[way.workers], stop_at=STOP_AT)
        dist.barrier()
    for begun in WAYS:
        for way in WAYS:
            run_dir = folder / f"{begun}, then {way}"
            if rank == 0:
                shutil.copytree(folder / f"stopped {begun}", run_dir)
            dist.barrier()
            if rank < way.workers:
                trained(way, run_dir, worlds[way.workers], resume=True)
            dist.barrier()
            found[run_dir.name] = str(run_dir)
    left = {
        f"{begun}, then {then}": left_behind(begun, then, folder / f"left {begun} {then}", worlds)
        for begun, then in CHANGES
    }
    exact = {
        way.algorithm: rounded(way.algorithm, folder / f"rounded {way}", worlds[3])
        for way in WAYS
        if way.workers == 3
    }
    if rank == 0:
        wanted = content(folder / f"whole {WAYS[0]}")
        ends = {name: content(Path(path)) for name, path in found.items()}
        ends |= {f"whole {way}": content(folder / f"whole {way}") for way in WAYS}
        told = {
            "left": left,
            "rounded": exact,
            "names": sorted(wanted),
            "begun": {str(w): last_checkpoint(folder / f"stopped {w}").name for w in WAYS},
            "differing": {
                name: [key for key in {*wanted, *end} if wanted.get(key) != end.get(key)]
                for name, end in ends.items()
            },
        }
        (folder / "found.json").write_text(json.dumps(told))
    World.leave()


if __name__ == "__main__":
    main()
