"""Four workers over gloo that train through stores, by cases that come as lines of JSON.

torchrun --nproc-per-node 4 training_worker.py
"""

import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan
from ridgeline.runtime.kvstore.serving.joining.beside import ServerBeside
from ridgeline.runtime.kvstore.values import placement
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.training.loop import train
from ridgeline.state.snapshot import Snapshot
from ridgeline.workers.world import World

sys.path += [str(Path(__file__).parents[1] / name) for name in ("", "sync", "starts")]

from relay import STANDS_FOR
from stopped_runs import StopHereError, cross_entropy, last_checkpoint, stopping_loss, tiny_task
from stopped_runs import same as same_checkpoints
from training_setups import PLAIN, STEPS, STORE, Net, Setup, by_one, gap, plan_of, same

from answering import serve


def stepping(world: World, setup: Setup, plan: Plan) -> PlannedStep:
    """The step of a setup, over the workers of a world."""
    return PlannedStep(
        setup.model,
        setup.loss_fn,
        setup.optimizer,
        plan,
        device="cpu",
        process_group=world.process_group,
    )


STARTED = weakref.WeakSet[ServerBeside]()
_begin = ServerBeside.__init__


def _begin_noted(beside: ServerBeside, *args: Any, **kwargs: Any) -> None:
    _begin(beside, *args, **kwargs)
    STARTED.add(beside)


ServerBeside.__init__ = _begin_noted  # type: ignore[method-assign]


def run(world: World, algorithm: str, case: dict[str, Any]) -> dict[str, Any]:
    """What a training leaves, and what its step shows."""
    setup = Setup(case, world.rank, world.size)
    plan = plan_of(world.size, algorithm, case)
    hooked: list[torch.Tensor] = []
    setup.optimizer.register_step_post_hook(
        lambda *_: hooked.__setitem__(slice(None), setup.parameters())
    )
    with stepping(world, setup, plan) as step:
        losses = []
        for number in range(case.get("steps", STEPS)):
            losses.append(step(setup.batch(world.rank, number)).item())
            setup.scheduler.step()
            if number in case.get("kills", ()):
                kill_server_beside()
        state = step.optimizer_state()
        synchronizer: Any = step.synchronizer
        return {
            "parameters": setup.parameters(),
            "hooked": same(hooked, setup.parameters()),
            "state": state,
            "losses": losses,
            "frames": [span.name for span in step.timeline().frames],
            "sent_bytes": synchronizer._reducer._transport.sent_bytes if algorithm == STORE else 0,
            "payloads": [bucket.payload.numel() for bucket in synchronizer.buckets],
            "notes": [*step.notes],
            "outages": [] if step.outages is None else [*map(str, step.outages())],
        }


def kill_server_beside() -> None:
    """Kill the server that this worker has started, if it has one, and go on at once.

    Another one is ready to take over: who looked for it in memory, for a second on a busy host, would be back
    when that has long happened, and would have waited for nothing. And a process that stands for the server
    (`relay`) would be gone some moments before it, in which short steps are made.
    """
    for beside in STARTED:
        if not beside._ends:
            number = beside._process.pid
            _, _, other = Path(f"/proc/{number}/comm").read_text().partition(STANDS_FOR)
            os.kill(int(other or number), SIGKILL)


def trained(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """A training through a store beside that of one process, and beside an all-reduce."""
    ours = run(world, STORE, case)
    told = {
        name: ours[name]
        for name in ("frames", "sent_bytes", "payloads", "notes", "outages", "hooked")
    }
    if case.get("has_reference", True):
        reference = by_one(case, world.size)
        told["by one"] = same(ours["parameters"], reference.parameters())
        if world.rank == 0:
            told["state"] = same(ours["state"], reference.optimizer.state_dict())
    if case.get("has_peer", True):
        theirs = run(world, PLAIN, case)
        told["gap"] = gap(ours["parameters"], theirs["parameters"])
        told["peer"] = same(ours["parameters"], theirs["parameters"])
    return told


def put_back(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Steps that a snapshot takes back, repeated; then state that is loaded between two steps."""
    setup = Setup(case, world.rank, world.size)
    model, optimizer = setup.model, setup.optimizer
    data = [setup.batch(world.rank, number) for number in range(STEPS)]
    runs = []
    with PlannedStep(
        model,
        setup.loss_fn,
        optimizer,
        plan_of(world.size, STORE, case),
        device="cpu",
        process_group=world.process_group,
    ) as step:
        at_first = Snapshot(model, optimizer, None, step.synchronizer)
        for _ in range(2):
            for batch in data[:3]:
                step(batch)
            runs.append(setup.parameters())
            if len(runs) == 1:
                at_first.restore()
        snapshot = Snapshot(model, optimizer, None, step.synchronizer)
        for _ in range(2):
            for batch in data[3:]:
                step(batch)
            runs.append(setup.parameters())
            snapshot.restore()
        whole = shared(step.optimizer_state(), world)
        optimizer.load_state_dict(whole)
        loaded = same(optimizer.state_dict()["state"], whole["state"])
        for batch in data[3:]:
            step(batch)
        runs.append(setup.parameters())
    return {
        "from the first": same(runs[0], runs[1]),
        "repeated": same(runs[2], runs[3]),
        "loaded": same(runs[2], runs[4]) and loaded,
    }


def shared(state: dict[str, Any], world: World) -> dict[str, Any]:
    """What the first worker has, on all."""
    told = [state]
    dist.broadcast_object_list(told, group=world.group(), group_src=0)
    return told[0]


def written(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What comes of a script that writes parameters or settings between steps, on all workers or on the last."""
    writes = case["who"] == "all" or world.rank == world.size - 1
    ends = []
    for algorithm in (STORE, PLAIN):
        setup = Setup(case, world.rank, world.size)
        plan = plan_of(world.size, algorithm, case)
        with stepping(world, setup, plan) as step:
            try:
                for number in range(STEPS):
                    step(setup.batch(world.rank, number))
                    if number == 2 and writes and case["what"] == "parameters":
                        with torch.no_grad():
                            setup.model.first.weight.clamp_(-0.1, 0.1)  # type: ignore[union-attr]
                    if number == 2 and writes and case["what"] == "data":
                        setup.model.first.weight.data.clamp_(-0.1, 0.1)  # type: ignore[union-attr]
                    if number == 2 and writes and case["what"] == "settings":
                        setup.optimizer.param_groups[0]["lr"] = 0.5
            except RidgelineError as error:
                return {"message": f"{type(error).__name__}: {error}"}
        ends.append(setup.parameters())
    return {"message": "", "same": same(*ends), "gap": gap(*ends)}


def without_waiting(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What workers that do not wait for each other come to; the last one trains for fewer steps if `unequal`."""
    setup = Setup(case, world.rank, world.size)
    plan = plan_of(world.size, STORE, case)
    count = case["steps"] // 2 if case["unequal"] and world.rank else case["steps"]
    with stepping(world, setup, plan) as step:
        losses = [step(setup.batch(0, 0)).item() for _ in range(count)]
        state = step.optimizer_state()
    told = [None] * world.size
    dist.all_gather_object(told, setup.parameters(), group=world.group())
    return {
        "losses": losses,
        "alike": all(same(one, told[0]) for one in told),
        "steps": float(state["state"][0].get("step", 0)) if world.rank == 0 else 0.0,
    }


def resumed(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Whether runs end with the same checkpoint: whole, stopped and taken up again, and by another algorithm."""
    loss_fn, stop = stopping_loss()

    def optimizer(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), 0.01)

    task = tiny_task(Net, optimizer, loss_fn, 48, classes=5)

    def train_to_end(name: str, algorithm: str = STORE, *, resume: bool = False) -> None:
        plan = plan_of(world.size, algorithm, case)
        options: Any = {"epochs": 2, "seed": 5, "resume": resume, "checkpoint_every": 2}
        train(task, plan, world, run_dir=Path(case["folder"]) / name, **options)

    train_to_end("whole")
    for name, algorithm, following in (
        ("stopped", STORE, STORE),
        ("taken up by all", STORE, PLAIN),
        ("taken up by a store", PLAIN, STORE),
    ):
        stop(9)
        with pytest.raises(StopHereError):
            train_to_end(name, algorithm)
        stop(0)
        train_to_end(name, following, resume=True)
    names = ("stopped", "taken up by all", "taken up by a store")
    whole = last_checkpoint(Path(case["folder"]) / "whole")
    others = {name: last_checkpoint(Path(case["folder"]) / name) for name in names}
    return {name: same_checkpoints(whole, other) for name, other in others.items()}


def reported(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What a run tells of servers that are killed in its first step, and what it tells when it is taken up again."""
    steps = 0

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == case["kills"]:
            kill_server_beside()
        return cross_entropy(model, batch)

    def optimizer(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    task = tiny_task(Net, optimizer, loss_fn, 16, classes=5)
    plan = plan_of(world.size, STORE, case)
    told = []
    for epochs in (1, 2):
        options: Any = {"epochs": epochs, "seed": 5, "resume": epochs > 1}
        done = train(task, plan, world, run_dir=Path(case["folder"]), **options)
        told.append([*map(str, done.history.outages)])
    return {"told": told}


class Wrapped(torch.optim.SGD):
    """No class of torch's."""


def hooked(optimizer: Optimizer, *_: Any) -> None:
    """Stands for what looks at gradients before a step."""


BETWEEN: dict[str, Callable[[Optimizer, Any], object]] = {
    "state_dict": lambda optimizer, _: optimizer.state_dict(),
    "added": lambda optimizer, model: optimizer.add_param_group({"params": [model.scale]}),
    "removed": lambda optimizer, _: optimizer.param_groups[0]["params"].pop(0),
    "looked into": lambda optimizer, model: optimizer.state[model.scale],
    "cleared": lambda optimizer, _: optimizer.state.clear(),
    "hook later": lambda optimizer, _: optimizer.register_step_pre_hook(hooked),
    "replaced later": lambda optimizer, _: setattr(optimizer, "step", print),
    "set": lambda optimizer, model: optimizer.state.update({model.scale: {}}),
}
"""What a script does to an optimizer between two steps."""


def refused(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """What is said to what a store does not do."""
    setup = Setup({"optimizer": "SGD", **case}, world.rank, world.size)
    model, optimizer, what = setup.model, setup.optimizer, case["what"]
    if what == "class":
        optimizer = Wrapped(model.parameters(), lr=0.1)
    if what == "of another":
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    if what == "replaced":
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign,misc]
    if what == "hook":
        optimizer.register_step_pre_hook(hooked)
    clip = 1.0 if what == "clip" else None

    def make(algorithm: str = STORE) -> PlannedStep:
        plan = plan_of(world.size, algorithm, case)
        group = world.process_group
        arguments: Any = {"clip_norm": clip, "device": "cpu", "process_group": group}
        return PlannedStep(model, setup.loss_fn, optimizer, plan, **arguments)

    try:
        with make() as step, make() if what == "two steps" else contextlib.nullcontext() as other:
            batches = [setup.batch(world.rank, number) for number in range(3)]
            step(batches[0])
            if other is not None:
                other(batches[1])
            if what == "beside another step":
                with make(PLAIN) as plain:
                    plain(batches[1])
            if what in BETWEEN:
                BETWEEN[what](optimizer, model)
            if what == "unfrozen":
                model.frozen.requires_grad_(requires_grad=True)  # type: ignore[union-attr]
            step(batches[1])
        if what == "state_dict, closed":
            optimizer.state_dict()
        if what == "step, closed":
            optimizer.step()
        if what == "another step":
            make()
    except RidgelineError as error:
        message = f"{type(error).__name__}: {error}"
        hooked_parameters = [n for n, p in model.named_parameters() if has_hooks(p)]
        return {"message": message} | ({"hooked": hooked_parameters} if hooked_parameters else {})
    return {"message": ""}


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether a reducer that was refused would still hear of its gradients."""
    return bool(parameter._post_accumulate_grad_hooks)


CASES: dict[str, Callable[[World, dict[str, Any]], dict[str, Any]]] = {
    "trained": trained,
    "put back": put_back,
    "written": written,
    "resumed": resumed,
    "reported": reported,
    "without waiting": without_waiting,
    "refused": refused,
}

if __name__ == "__main__":
    placement.LARGE_ELEMENTS = 200  # so that values are divided among the workers
    serve(lambda world, case: CASES[case["kind"]](world, case))
