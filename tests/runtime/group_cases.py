"""Worker script: steps over some workers of a job, and what they are refused.

    torchrun --nproc-per-node 4 group_cases.py DIRECTORY          all cases, in groups of two
    torchrun --nproc-per-node 2 group_cases.py DIRECTORY NUMBER   what group NUMBER does, as a job of its own

Every worker writes what became of it to DIRECTORY.
"""

import gc
import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.layout.ownership import (
    parted_groups,
    replicated_axes,
    total_norm,
    writes_checkpoint,
)
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.training.readings import LossReader
from ridgeline.workers.world import World

PATIENCE = timedelta(seconds=1)
"""Of a worker whose group another one has left, from then on."""


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def make(seed: int = 0, workers: int = 2, **where: Any) -> PlannedStep:
    plan = Plan(workers=workers, sync=Sync(bucket_bytes=(64,)))
    model, optimizer = fresh(seed)
    return PlannedStep(model, loss_fn, optimizer, plan, clip_norm=0.1, device="cpu", **where)


def trained(number: int, **where: Any) -> dict[str, Any]:
    """Group `number` makes so many steps more than the first, from models that differ between its workers."""
    seed = 10 * number + World.join(device="cpu", **where).rank
    with make(seed, **where) as step:
        generator = torch.Generator().manual_seed(seed)
        losses = [
            float(step(torch.randn(4, 8, generator=generator))) for _ in range(6 + 3 * number)
        ]
        state = [*step.model.state_dict().values()]
        for of in step.optimizer.state.values():
            state += of.values()
        return {
            "losses": losses,
            "bits": [hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in state],
            "ranks": step.world.ranks(),
            "policies": policies(),
        }


def policies() -> dict[str, list[int]]:
    """Scheduling policies of this process's threads, by the name of a thread."""
    found: dict[str, set[int]] = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            name, policy = (
                (thread / "comm").read_text().strip(),
                os.sched_getscheduler(int(thread.name)),
            )
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        found.setdefault(name, set()).add(policy)
    return {name: sorted(several) for name, several in found.items()}


def message(call: Callable[[], object]) -> str:
    """What a call is refused with; empty if it is not."""
    try:
        call()
    except RidgelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(mine: Any, other: Any) -> dict[str, str]:
    """What is refused of meshes and groups."""
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    nameless = init_device_mesh("cpu", (2, 2))
    gone = dist.new_group([0, 1, 2, 3])
    dist.barrier()  # one that still connects would find the others gone
    dist.destroy_process_group(gone)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    ranks = [0, 1] if dist.get_rank() > 1 else [2, 3]
    calls: dict[str, Callable[[], object]] = {
        "two axes": lambda: make(mesh=plane),
        "two axes without names": lambda: make(mesh=nameless),
        "both": lambda: make(mesh=line, process_group=mine),
        "a world as well": lambda: make(mesh=line, world=World(0, 1, 0, torch.device("cpu"))),
        "no mesh": lambda: make(mesh=(2, 2)),
        "no group": lambda: make(process_group=[0, 1]),
        "outside of a group": lambda: make(process_group=other),
        "outside of a mesh": lambda: make(
            mesh=type(line)("cpu", ranks, mesh_dim_names=("data",), _init_backend=False)
        ),
        "destroyed": lambda: make(process_group=gone),
        "another device": lambda: World.join(device="cuda", mesh=line),
        "workers of the plan": lambda: make(workers=4, process_group=mine),
    }
    return {name: message(call) for name, call in calls.items()}


def differing(mine: Any, number: int) -> dict[str, str]:
    """Models that differ at the start, and state that one writes later, in the second group."""

    def other_model() -> None:
        model = nn.Linear(3, 2 + dist.get_rank() // 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        PlannedStep(model, loss_fn, optimizer, Plan(workers=2), process_group=mine)

    def other_state() -> None:
        with make(process_group=mine) as step:
            step(torch.randn(4, 8))
            if dist.get_rank() == 3:
                step.optimizer.param_groups[0]["lr"] = 0.5
            step(torch.randn(4, 8))

    if not number:
        return {}
    return {"model": message(other_model), "state": message(other_state)}


def absent(number: int) -> str:
    """Rank 3 makes two steps; rank 2 waits for it in the third, while the others make all of theirs."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    store = dist.distributed_c10d._get_default_store()

    def run() -> None:
        step = make(process_group=groups[number])
        for _ in range(2):
            step(torch.randn(4, 8))
        if dist.get_rank() == 3:
            store.wait(["told"], timedelta(seconds=90))
            return
        if number:
            dist.distributed_c10d._set_pg_timeout(PATIENCE, groups[number])
        for _ in range(3):
            step(torch.randn(4, 8))

    told = message(run)
    if dist.get_rank() == 2:
        store.set("told", "1")
    return told


def destroyed(number: int) -> dict[str, Any]:
    """A step whose group goes before the job's own; then no thread speaks for it any more."""
    before = threading.enumerate()

    def run() -> None:
        ranks = [2 * number, 2 * number + 1]
        group = dist.new_group(ranks, use_local_synchronization=True)
        with make(process_group=group) as step:
            step(torch.randn(4, 8))
            dist.barrier()  # the other one may not have received all of the step
            dist.destroy_process_group(group)
            step(torch.randn(4, 8))

    told = message(run)
    gc.collect()
    speaking = [t for t in threading.enumerate() if t not in before]
    for thread in speaking:
        thread.join(60)
    return {"told": told, "speaking": [t.name for t in speaking if t.is_alive()]}


def owned() -> dict[str, Any]:
    """What the mesh says of who holds what, where parameters are parted, and the norm of parted gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "shard"))
    rank = dist.get_rank()
    world = World(rank, 4, rank, torch.device("cpu"), mesh)
    whole = torch.randn(40, generator=torch.Generator().manual_seed(1))
    mine = [*whole.chunk(2)[rank % 2].split(7)]
    return {
        "replicated": replicated_axes(world),
        "parted": [dist.get_process_group_ranks(group) for group in parted_groups(world)],
        "writes": writes_checkpoint(world),
        "along data": world.ranks("data"),
        "root": world.root("data"),
        "places": [world.axis_rank("data"), world.axis_rank("shard"), world.axis_rank("tensor")],
        "sizes": [world.axis_size("data"), world.axis_size("shard"), world.axis_size("tensor")],
        "norm": float(total_norm(mine, parted_groups(world))),
        "whole norm": float(whole.norm()),
    }


def read(mine: Any) -> list[float]:
    """The mean of the losses 0, 1, 2 and 3, each of one worker."""
    world = World.join(device="cpu", process_group=mine)
    reader = LossReader(world, window_steps=1)
    reader.start(1)
    reader.add(torch.tensor(float(dist.get_rank())))
    [window] = reader.drain(wants_stop=False)
    return list(window.means)


def cases() -> dict[str, Any]:
    """Of a worker among four, in two groups of two."""
    rank = dist.get_rank()
    number = rank // 2
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine, other = groups[number], groups[1 - number]
    alone = [dist.new_group([r]) for r in range(4)][rank]
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    num_groups = len(dist.distributed_c10d._world.pg_map)
    told = {
        "group": trained(number, process_group=mine),
        "mesh": trained(number, mesh=plane),
        "one axis": trained(number, mesh=across["tensor"]),
        "across": trained(rank % 2, mesh=across),
        "alone": trained_alone(process_group=alone),
        "alone in a group": trained_alone(world=World(0, 1, 0, torch.device("cpu"))),
        "read": read(mine),
    }
    told["new groups"] = len(dist.distributed_c10d._world.pg_map) - num_groups
    told["refused"] = refused(mine, other)
    told["differing"] = differing(mine, number)
    told["owned"] = owned()
    return told


def trained_alone(**where: Any) -> list[float]:
    with make(workers=1, **where) as step:
        return [float(step(torch.ones(4, 8))) for _ in range(3)]


def main() -> None:
    torch.set_num_threads(1)
    World.join(device="cpu")
    rank, directory = dist.get_rank(), Path(sys.argv[1])
    if len(sys.argv) > 2:
        told: dict[str, Any] = trained(int(sys.argv[2]))
    else:
        told = cases()
        told["destroyed"] = destroyed(rank // 2)
        told["absent"] = absent(rank // 2)
    (directory / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    World.leave()


if __name__ == "__main__":
    main()
