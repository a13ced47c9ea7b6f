"""Workers whose state a script makes different, before the first step or between two."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import WorkloadError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.sync import outside_writes
from ridgeline.workers.world import World

Write = Callable[[nn.Module, torch.optim.Optimizer], object]


def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def told_of(world: World) -> dict[str, str]:
    """What worker 0 is told in each case."""
    saved, saved_optimizer = fresh(5)
    loss_fn(saved, torch.randn(4, 8)).backward()
    saved_optimizer.step()

    def load_model(model: nn.Module, _: Any) -> None:
        model.load_state_dict(saved.state_dict())

    def load_optimizer(_: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.load_state_dict(copy.deepcopy(saved_optimizer.state_dict()))

    def load_both(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        load_model(model, optimizer)
        load_optimizer(model, optimizer)

    def set_rate(_: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = 0.5

    def schedule(_: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9

    def write_buffer(model: nn.Module, _: Any) -> None:
        model[1].running_mean.add_(1.0)  # type: ignore[index,operator]

    def clamp(model: nn.Module, _: Any) -> None:
        with torch.no_grad():
            model[0].weight.clamp_(-1.0, 1.0)  # type: ignore[index,operator]

    def give_memory(model: nn.Module, _: Any) -> None:
        model[2].weight.data = model[2].weight.data + 1.0  # type: ignore[index]

    def copy_through_data(model: nn.Module, _: Any) -> None:
        model[2].bias.data.copy_(torch.ones(2))  # type: ignore[index]

    def scale_through_data(model: nn.Module, _: Any) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(2.0)

    def assign(model: nn.Module, _: Any) -> None:
        model.load_state_dict(copy.deepcopy(saved.state_dict()), assign=True)

    def assign_own(model: nn.Module, _: Any) -> None:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def alone(write: Write, rank: int = 1) -> Write:
        return lambda *both: write(*both) if world.rank == rank else None

    return {
        "model loaded first": train(world, alone(load_model), (0,)),
        "optimizer loaded first": train(world, alone(load_optimizer), (0,)),
        "buffer written first": train(world, alone(write_buffer), (0,)),
        "both loaded first, by all": train(world, load_both, (0,)),
        "model loaded later": train(world, alone(load_model), (2,)),
        "optimizer loaded later": train(world, alone(load_optimizer), (2,)),
        "both loaded later, by all": train(world, load_both, (2,)),
        "given other memory later": train(world, alone(give_memory, 0), (2,)),
        "other parameters put in place later": train(world, alone(assign, 0), (2,)),
        "equal parameters put in place later": train(world, alone(assign_own, 0), (2,)),
        "copied through data later": train(world, alone(copy_through_data, 0), (20,)),
        "scaled through data later": train(world, alone(scale_through_data, 0), (20,)),
        "scaled through data, by all": train(world, scale_through_data, (20,)),
        "learning rate set later": train(world, alone(set_rate), (2,)),
        "learning rate scheduled, by all": train(world, schedule, range(40)),
        "written in every step, by all": compared(world, clamp),
    }


def train(world: World, write: Write, when: Any, steps: int = 70) -> str:
    """Some steps, and a writing before some; the message, or that it ran."""
    model, optimizer = fresh(world.rank)
    with PlannedStep(model, loss_fn, optimizer, Plan(workers=world.size)) as step:
        try:
            for number in range(steps):
                if number in when:
                    write(model, optimizer)
                step(torch.randn(4, 8))
        except WorkloadError as error:
            return str(error)
    return "ran"


def compared(world: World, write: Write) -> str:
    """The same with a writing before each step, and the steps after which the state was compared."""
    steps: list[str] = []
    check = outside_writes.check_same_state

    def counted(*args: Any, when: str, **settings: Any) -> None:
        steps.extend(when.split()[2].rstrip(",") for _ in [0] if when.startswith("after"))
        check(*args, when=when, **settings)

    outside_writes.check_same_state = counted
    try:
        told = train(world, write, range(40), 40)
    finally:
        outside_writes.check_same_state = check
    return f"{told}, compared after {', '.join(steps)}"
