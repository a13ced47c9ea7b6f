"""Worker script: updates divided among workers beside those that every worker makes, on two workers over gloo.

torchrun --nproc-per-node 2 sharded_cases.py OUTPUT
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from smallest_models import of_one_scalar, without_elements
from stopped_runs import Losses, StopHereError, last_checkpoint, stopping_loss, tiny_task
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.checkpoints import checkpoint
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.task import Task
from ridgeline.state.snapshot import Snapshot
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World

STEPS = 8
SHARDED, PLAIN = "sharded", "all_reduce"
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {}),
    "Adagrad": (torch.optim.Adagrad, {}),  # has its state before the first step
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
}


class Net(nn.Module):
    """Images, a scalar, a layer that is used where the batch says so, a frozen one, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.first, self.second = nn.Linear(8, 37), nn.Linear(37, 37)
        self.frozen, self.last = nn.Linear(37, 37), nn.Linear(37, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, *, deep: bool = True) -> Tensor:
        hidden = self.first(self.norm(self.conv(x)).relu().mean((2, 3)))
        hidden = self.second(hidden).relu() if deep else hidden
        return self.last(self.frozen(hidden).relu() * self.scale)


def planned(algorithm: str, **knobs: Any) -> Plan:
    sync = Sync(algorithm=algorithm, bucket_bytes=(400, 2000))
    return Plan(workers=2, threads=1, sync=sync, **knobs)


def fresh(kind: str) -> tuple[Net, Optimizer]:
    """A model, and an optimizer of two groups with settings of their own."""
    torch.manual_seed(0)
    model = Net()
    parameters = list(model.parameters())
    groups = [
        {"params": parameters[:3], "lr": 1e-2},
        {"params": parameters[3:], "lr": 5e-3, "weight_decay": 0.01},
    ]
    make, options = OPTIMIZERS[kind]
    return model, make(groups, **options)  # type: ignore[arg-type]


def loss_of(*, deep: bool = True) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: nn.functional.cross_entropy(model(batch[0], deep=deep), batch[1])


def batches(world: World, count: int = STEPS) -> list[Any]:
    generator = torch.Generator().manual_seed(1 + world.rank)
    return [
        (
            torch.randn(8, 3, 8, 8, generator=generator),
            torch.randint(0, 5, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def trained(
    world: World,
    algorithm: str,
    kind: str,
    *,
    clip: float | None = None,
    skips: bool = False,
    **knobs: Any,
) -> dict[str, Any]:
    """A model, the whole state of its optimizer, and what each worker had, after some steps."""
    model, optimizer = fresh(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plan = planned(algorithm, **knobs)
    with PlannedStep(
        model, loss_of(deep=not skips), optimizer, plan, device="cpu", clip_norm=clip
    ) as step:
        synchronizer: Any = step.synchronizer
        sent, left = [0], [0]
        for batch in batches(world):
            with counted_messages() as messages:
                step(batch)
            scheduler.step()
            left.append(sum(messages))
            sent.append(synchronizer._transport.sent_bytes)
        state = step.optimizer_state()
        return {
            "parameters": [p.detach().clone() for p in model.parameters()],
            "state": state if world.rank == 0 else None,
            "others have no state": world.rank == 0 or not state["state"] or algorithm == PLAIN,
            "groups are whole": [p for g in optimizer.param_groups for p in g["params"]]
            == list(model.parameters()),
            "frames": [span.name for span in step.timeline().frames],
            "payloads": [bucket.payload.numel() for bucket in synchronizer.buckets],
            "state_bytes": state_bytes(optimizer, model),
            "sent_bytes": sent[-1] - sent[-2],
            "link_bytes": left[-1],
        }


@contextlib.contextmanager
def counted_messages() -> Iterator[list[int]]:
    """Bytes of each message that this worker sends to another one inside."""
    send, sizes = dist.ProcessGroup.send, list[int]()

    def counting(group: dist.ProcessGroup, tensors: list[Tensor], *rest: Any) -> Any:
        sizes.extend(tensor.numel() * tensor.element_size() for tensor in tensors)
        return send(group, tensors, *rest)

    with mock.patch.object(dist.ProcessGroup, "send", counting):
        yield sizes


def state_bytes(optimizer: Optimizer, model: Net) -> int:
    """Of what this worker remembers of each element of trained parameters."""
    frozen = set(model.frozen.parameters())
    return sum(
        value.numel() * value.element_size()
        for parameter, state in dict.items(optimizer.state)
        for key, value in state.items()
        if parameter not in frozen
        and key != "step"
        and isinstance(value, Tensor)
        and value.numel() > 1
    )


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same bits."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def gap(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def compared(world: World, kind: str, **options: Any) -> dict[str, Any]:
    """A divided training beside the plain one."""
    ours, theirs = (trained(world, name, kind, **options) for name in (SHARDED, PLAIN))
    told = {key: value for key, value in ours.items() if key not in ("parameters", "state")}
    return {
        **told,
        "whole_bytes": theirs["state_bytes"],
        "parameters": same(ours["parameters"], theirs["parameters"]),
        "gap": gap(ours["parameters"], theirs["parameters"]),
        "state": same(ours["state"], theirs["state"]),
    }


def everyones(found: dict[str, Any], world: World) -> list[dict[str, Any]]:
    return [json.loads(told) for told in gather_bytes(json.dumps(found).encode(), world)]


def make_task(loss_fn: Losses) -> Task:
    """Of images; the same for one worker."""
    return tiny_task(
        Net,
        lambda model: torch.optim.AdamW(model.parameters(), 0.01),
        loss_fn,
        48,
        shape=(3, 8, 8),
        classes=5,
    )


def resumed(world: World, folder: Path) -> dict[str, bool]:
    """Whether runs end with the same checkpoint: whole, stopped and taken up again, and by another algorithm."""
    loss_fn, stop = stopping_loss()
    task = make_task(loss_fn)

    def run(name: str, algorithm: str = SHARDED, *, resume: bool = False) -> None:
        options = {"epochs": 2, "seed": 5, "resume": resume, "checkpoint_every": 2}
        train(task, planned(algorithm), world, run_dir=folder / name, **options)  # type: ignore[arg-type]

    run("whole")
    run("plain", PLAIN)
    for name in ("stopped", "taken up by all"):
        stop(9)
        with pytest.raises(StopHereError):
            run(name)
        stop(0)
        run(name, SHARDED if name == "stopped" else PLAIN, resume=True)
    names = ("whole", "plain", "stopped", "taken up by all")
    ends = [last_checkpoint(folder / name) for name in names]
    contents = [checkpoint.content(end)[:2] for end in ends]
    return {name: same(contents[0], content) for name, content in zip(names, contents, strict=True)}


def put_back(world: World) -> dict[str, bool]:
    """Steps that a snapshot takes back, repeated; then state that is loaded between two steps."""
    model, optimizer = fresh("AdamW")
    data = batches(world)
    with PlannedStep(model, loss_of(), optimizer, planned(SHARDED), device="cpu") as step:
        for batch in data[:3]:
            step(batch)
        snapshot = Snapshot(model, optimizer, None, step.synchronizer)
        runs = []
        for _ in range(2):
            for batch in data[3:]:
                step(batch)
            runs.append([p.detach().clone() for p in model.parameters()])
            snapshot.restore()
        whole = share(step.optimizer_state(), world)
        optimizer.load_state_dict(whole)
        for batch in data[3:]:
            step(batch)
        runs.append([p.detach().clone() for p in model.parameters()])
    return {"repeated": same(runs[0], runs[1]), "loaded": same(runs[0], runs[2])}


def share(state: dict[str, Any], world: World) -> dict[str, Any]:
    """What the first worker has, on all."""
    told = [state]
    dist.broadcast_object_list(told, group=world.group(), group_src=0)
    return told[0]


def hooked(world: World) -> dict[str, Any]:
    """Averages of the weights that a hook behind the optimizer's steps makes, by either algorithm."""
    averages: dict[str, list[Tensor]] = {}
    notes: dict[str, list[str]] = {}
    for algorithm in (SHARDED, PLAIN):
        model, optimizer = fresh("SGD")
        average = averages[algorithm] = [p.detach().clone() for p in model.parameters()]

        def follow(optimizer: Optimizer, *_: Any, average: list[Tensor] = average) -> None:
            held = [p.detach() for group in optimizer.param_groups for p in group["params"]]
            torch._foreach_lerp_(average, held, 0.1)

        optimizer.register_step_post_hook(follow)
        with PlannedStep(model, loss_of(), optimizer, planned(algorithm), device="cpu") as step:
            for batch in batches(world):
                step(batch)
            notes[algorithm] = step.notes
        assert [*optimizer._optimizer_step_post_hooks.values()] == [follow]  # type: ignore[attr-defined]
    return {"averages": same(averages[SHARDED], averages[PLAIN]), "notes": notes[SHARDED]}


def made_again(world: World) -> bool:
    """A step that is closed and made again with the same optimizer, given the whole state, is like one."""
    ends = []
    for algorithm in (SHARDED, PLAIN):
        model, optimizer = fresh("AdamW")
        for part in (batches(world)[:4], batches(world)[4:]):
            with PlannedStep(model, loss_of(), optimizer, planned(algorithm), device="cpu") as step:
                for batch in part:
                    step(batch)
                whole = share(step.optimizer_state(), world)
            optimizer.load_state_dict(whole)
        ends.append([p.detach().clone() for p in model.parameters()])
    return same(*ends)


def messages(world: World) -> dict[str, str]:
    """What is refused, and how."""
    model, optimizer = fresh("SGD")
    weights = [p for p in model.parameters() if p.dim() == 2]
    partly = torch.optim.SGD([p for p in model.parameters() if p is not model.scale], 0.1)
    strided = nn.Linear(4, 4)
    strided.weight = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    data = batches(world)

    def make(model: nn.Module, optimizer: Optimizer) -> None:
        PlannedStep(model, loss_of(), optimizer, planned(SHARDED), device="cpu").close()

    def moved() -> None:
        model, optimizer = fresh("SGD")
        with PlannedStep(model, loss_of(), optimizer, planned(SHARDED), device="cpu") as step:
            step(data[0])
            model.last.weight.data = model.last.weight.data.clone()
            step(data[1])

    def written() -> None:
        model, optimizer = fresh("SGD")
        with PlannedStep(model, loss_of(), optimizer, planned(SHARDED), device="cpu") as step:
            step(data[0])
            if world.rank:
                model.last.weight.data.mul_(1.5)
            step(data[1])

    guarded = fresh("SGD")
    guarded[1].step = lambda closure=None: None  # type: ignore[method-assign,misc]
    hooked_before = fresh("SGD")
    hooked_before[1].register_step_pre_hook(lambda *_: None)
    with PlannedStep(model, loss_of(), optimizer, planned(SHARDED), device="cpu") as step:
        step(data[0])
        while_open = said(optimizer.state_dict)
    return {
        "looks at whole parameters": said(lambda: make(model, torch.optim.Adafactor(weights))),
        "not the optimizer's": said(lambda: make(model, partly)),
        "with gaps": said(lambda: make(strided, torch.optim.SGD(strided.parameters(), 0.1))),
        "moved": said(moved),
        "hook before": said(lambda: make(*hooked_before)),
        "another step": said(lambda: make(*guarded)),
        "written by one": said(written),
        "state_dict, open": while_open,
        "state_dict, closed": said(optimizer.state_dict),
        "step, closed": said(optimizer.step),
        "in parts already": said(lambda: make(model, optimizer)),
    }


def looks(world: World, algorithm: str) -> list[str]:
    """What is said to steps with one optimizer, and to who looks into it behind them."""
    model, optimizer = fresh("Adam")
    plans = (planned(algorithm), planned(SHARDED))
    one, other = (PlannedStep(model, loss_of(), optimizer, p, device="cpu") for p in plans)
    with one, other:
        batch = batches(world, 1)[0]
        told = said(lambda: [step(batch) for step in (one, other, one)])
    state, key = optimizer.state, model.scale
    looks = (lambda: state[key], lambda: state.get(key), lambda: key in state, state.values)
    return [told, *map(said, looks)]


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except RidgelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    world = World.join(threads=1, device="cpu")
    output = Path(sys.argv[1])
    found: dict[str, Any] = {
        "optimizers": {kind: everyones(compared(world, kind), world) for kind in OPTIMIZERS},
        "ways": {
            "clipped": everyones(compared(world, "SGD", clip=0.1), world),
            "accumulated": everyones(compared(world, "Adam", accumulate=2), world),
            "channels last": everyones(
                compared(world, "Adam", memory_format="channels_last"), world
            ),
            "fused": everyones(compared(world, "Adam", optimizer="fused"), world),
            "skipped by one": everyones(compared(world, "Adam", skips=world.rank == 1), world),
            "skipped by all": everyones(compared(world, "Adam", skips=True), world),
        },
        "hooked": hooked(world),
        "made again": made_again(world),
        "one scalar": of_one_scalar(world, planned(SHARDED)),
        "without elements": same(*(without_elements(world, planned(a)) for a in (SHARDED, PLAIN))),
        "put back": put_back(world),
        "messages": messages(world),
        "looks": [looks(world, algorithm) for algorithm in (SHARDED, PLAIN)],
        "resumed": resumed(world, output.parent),
    }
    if world.rank == 0:
        output.write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
