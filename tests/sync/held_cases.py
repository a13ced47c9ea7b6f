"""Worker script: steps that update late beside those that wait, on two workers over gloo.

torchrun --nproc-per-node 2 held_cases.py OUTPUT
"""

import contextlib
import importlib
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sharded_cases import OPTIMIZERS, batches, fresh, loss_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import ridgeline as rl
from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.sync.unread import UnreadParameter
from ridgeline.workers.world import World


class StopHereError(Exception):
    """What a loss raises in the middle of training."""


class Tied(nn.Module):
    """A multilayer perceptron whose last layer is the first one's weight, read by no module that owns it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x.mean((2, 3)).repeat(1, 3)[:, :8]).relu())
        return nn.functional.linear(hidden.relu(), self.first.weight.t())


STATE_WRITES: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "state cleared": lambda optimizer: optimizer.state.clear(),
    "state zeroed": lambda optimizer: [one["exp_avg"].zero_() for one in optimizer.state.values()],
    "state replaced": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "parameter removed": lambda optimizer: optimizer.param_groups[0]["params"].pop(),
    "parameter moved": lambda optimizer: optimizer.param_groups[1]["params"].append(
        optimizer.param_groups[0]["params"].pop()
    ),
    "group removed": lambda optimizer: optimizer.param_groups.pop(0),
}
"""What scripts do to an optimizer between two steps."""


def planned(held: int, **knobs: Any) -> Plan:
    options: dict[str, Any] = {"held": held} if held else {}
    return Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(400, 400), options=options), **knobs)


def trained(world: World, held: int, case: str) -> dict[str, Any]:
    """Losses, and all state, after some steps of a case."""
    kind = case if case in OPTIMIZERS else "Adam"
    model, optimizer = fresh(kind)
    if case == "tied":
        torch.manual_seed(0)
        tied = Tied()
        model, optimizer = tied, torch.optim.SGD(tied.parameters(), lr=0.1, momentum=0.9)  # type: ignore[assignment]
    if case == "bf16":
        model.to(torch.bfloat16)
    plan = planned(held, accumulate=2 if case == "accumulated" else 1)
    later = optimizer.param_groups.pop(0) if case == "added" else {}
    scheduler = StepLR(optimizer, 1, gamma=0.7)
    losses: list[float] = []
    seen: list[Any] = []
    num_unread = 0

    def loss(net: nn.Module, batch: Any) -> Tensor:
        if case == "tied":
            return nn.functional.cross_entropy(net(batch[0]), batch[1])
        is_skipped = len(losses) % 3 == 2 and (case == "skipped" or world.rank == 1)
        deep = not (case in ("skipped", "skipped by one") and is_skipped)
        return loss_of(deep=deep)(net, batch)

    with contextlib.ExitStack() as open_steps:
        steps = [
            open_steps.enter_context(PlannedStep(model, loss, optimizer, plan, world=world))
            for _ in range(2 if case == "by two steps" else 1)
        ]
        for number, (images, labels) in enumerate(batches(world)):
            step = steps[number % len(steps)]
            if later and number == 4:
                optimizer.add_param_group(later)
            batch = [images.bfloat16() if case == "bf16" else images, labels]
            if case == "fails" and number == 4:
                seen.append(_failing(step, batch))
            losses.append(float(step(batch)))
            num_unread += sum(type(p) is UnreadParameter for p in model.parameters())
            scheduler.step()
            if case in STATE_WRITES and number == 4:
                STATE_WRITES[case](optimizer)
            if case == "read" and number % 3 == 1:
                model.eval()
                with torch.inference_mode():
                    seen.append(model(batch[0]).sum().item())
                model.train()
            if case == "saved" and number == 4:
                held_state = {k: v.clone() for k, v in model.state_dict().items()}
                optimizer.load_state_dict(optimizer.state_dict())
                model.load_state_dict(held_state)
    # By parameter, whichever of them had its first update first.
    state = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    tensors = [*model.state_dict().values(), *(v for v in state if isinstance(v, Tensor))]
    values = [t.double().flatten().tolist() for t in tensors]
    return {"values": [losses, seen, values], "num_unread": num_unread}


def waited(world: World) -> dict[str, Any]:
    """The optimizer's state, read directly, of steps that hold buckets and of steps that wait for all."""
    told: dict[str, Any] = {"outside": []}
    for held in (2, 0):
        model, optimizer = fresh("Adam")
        step = rl.TrainStep(model, loss_of(deep=True), optimizer, planned(held), device="cpu")
        step.wait()  # nothing has run
        for images, labels in batches(world)[:4]:
            step([images, labels])
        unread = [type(p) is UnreadParameter for p in model.parameters()]
        counts = _counts(optimizer)
        step.wait()
        told[str(held)] = {
            "num_unread": sum(unread),
            "before": counts,
            "after": _counts(optimizer),
            "num_left": sum(type(p) is UnreadParameter for p in model.parameters()),
            "values": [t.tolist() for t in _state(optimizer)],
            "notes": step.notes,
            "frames": [span.name for span in step.timeline().lane("compute")],
        }
        step.wait()
        step.close()
        step.wait()
        told["outside"].append([t.tolist() for t in _state(optimizer)] == told[str(held)]["values"])
    return told


def read_meanwhile(world: World) -> dict[str, Any]:
    """What another thread reads of parameters while the one that read them first has them updated."""
    model, optimizer = fresh("SGD")
    # torch.optim takes the name of its module away.
    module: Any = importlib.import_module("torch.optim.sgd")
    plain, kinds, seen = module.sgd, list[bool](), list[tuple[Tensor, Tensor]]()
    threads, are_new = list[threading.Thread](), list[bool]()

    def read(parameter: nn.Parameter) -> None:
        seen.append((parameter.detach().clone(), parameter))

    def updating(params: list[nn.Parameter], *arguments: Any, **named: Any) -> None:
        is_late = threading.current_thread() is not threading.main_thread()
        if is_late:
            kinds.extend(type(p) is UnreadParameter for p in params)
            threads.extend(threading.Thread(target=read, args=(p,)) for p in params)
            for thread in threads[-len(params) :]:
                thread.start()
        plain(params, *arguments, **named)

    step = rl.TrainStep(model, loss_of(deep=True), optimizer, planned(99), device="cpu")
    for images, labels in batches(world)[:4]:
        step([images, labels])
        module.sgd = updating
        # Not the main thread, whose updates are those of steps.
        first = threading.Thread(target=lambda: [p.sum() for p in model.parameters()])
        first.start()
        first.join()
        module.sgd = plain
        for thread in threads:
            thread.join()
        are_new.extend(torch.equal(*one) for one in seen)
        threads.clear()
        seen.clear()
    step.close()
    return {"unread": kinds, "new": are_new}


def _counts(optimizer: torch.optim.Optimizer) -> list[float]:
    """How often each parameter was updated, as its state says, read without the parameter itself."""
    return [float(one["step"]) for one in optimizer.state.values()]


def _state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [v for one in optimizer.state.values() for v in one.values() if isinstance(v, Tensor)]


def _failing(step: PlannedStep, batch: Any) -> str:
    """A forward pass that stops in the middle, on both workers."""
    layer = next(m for m in step.model.modules() if isinstance(m, nn.BatchNorm2d))

    def stop(*_: Any) -> None:
        raise StopHereError

    handle = layer.register_forward_pre_hook(stop)
    try:
        step(batch)
    except StopHereError:
        return "stopped"
    finally:
        handle.remove()
    return "went on"


def refused(world: World) -> dict[str, str]:
    """What is said of models and optimizers that do not go with it."""
    told = {}
    for case in ("hooks", "script", "clipped", "fused", "Adafactor"):
        model, optimizer = fresh("SGD")
        net: nn.Module = model
        if case == "Adafactor":
            optimizer = torch.optim.Adafactor(model.parameters())
        if case == "hooks":
            optimizer.register_step_post_hook(lambda *_: None)
        if case == "fused":
            optimizer.param_groups[0]["fused"] = True
        if case == "script":
            net = nn.Sequential(torch.jit.script(nn.Linear(8, 37)))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        clip_norm = 1.0 if case == "clipped" else None
        try:
            PlannedStep(
                net, loss_of(), optimizer, planned(2), world=world, clip_norm=clip_norm
            ).close()
        except RidgelineError as error:
            told[case] = f"{type(error).__name__}: {error}"
    return told


def main() -> None:
    world = World.join(threads=1, device="cpu")
    cases = (
        "SGD",
        "Adam",
        "AdamW",
        "ASGD",
        "tied",
        "accumulated",
        "read",
        "saved",
        "fails",
        "bf16",
        "skipped",
        "skipped by one",
        "added",
        "by two steps",
        *STATE_WRITES,
    )
    found: dict[str, Any] = {
        case: {str(held): trained(world, held, case) for held in (0, 1, 2, 99)} for case in cases
    }
    found["refused"] = refused(world)
    found["waited"] = waited(world)
    found["read meanwhile"] = read_meanwhile(world)
    if not world.rank:
        Path(sys.argv[1]).write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
