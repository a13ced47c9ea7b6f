"""Steps that several workers cannot synchronise, each refused by name."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ridgeline as rl
from ridgeline.errors import PlanError, WorkloadError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World


class Twice(nn.Module):
    """A layer in two reentrant checkpoints, each of which completes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


class Late(nn.Module):
    """A layer that from some step on is used once more, at the begin, and so completes its gradient last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = nn.Linear(4, 4)
        self.is_used_twice = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_used_twice:
            x = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.layer, self.first(x), use_reentrant=True)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def twice(world: World) -> None:
    train(Twice(), world)


def late(world: World) -> None:
    model = Late()
    train(model, world, lambda: setattr(model, "is_used_twice", True))


def outside(world: World) -> None:
    """The optimizer trains a parameter that the loss holds, not the model."""
    model = nn.Linear(4, 4)
    own = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), own], 0.1)
    PlannedStep(model, loss_fn, optimizer, Plan(workers=world.size))


def replaced(world: World) -> None:
    """A layer is put in another's place, and the optimizer is told."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def change() -> None:
        model[1] = nn.Linear(4, 2)
        optimizer.add_param_group({"params": list(model[1].parameters())})

    train(model, world, change, optimizer)


def interrupted(world: World) -> None:
    """Backward raises once, and the script goes on."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError("boom")

    def losing(model: nn.Module, batch: Any) -> Tensor:
        hidden = model[0](batch[0])  # type: ignore[index,operator]
        if len(batch) > 1:
            hidden.register_hook(fail)
        return model[1](hidden).square().mean()  # type: ignore[index,operator]

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, losing, optimizer, Plan(workers=world.size)) as step:
        with contextlib.suppress(ArithmeticError):
            step((torch.randn(3, 4), torch.zeros(())))
        step((torch.randn(3, 4),))


def unfrozen(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    train(model, world, lambda: model[0].requires_grad_(True))


def other_strides(world: World) -> None:
    model = nn.Conv2d(2, 2, 2)
    if world.rank:
        model.to(memory_format=torch.channels_last)
    train(model, world)


def other_plans(world: World) -> None:
    """Buckets and their exchange differ; how many threads compute may."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    PlannedStep(model, loss_fn, optimizer, Plan(workers=2, threads=1 + world.rank)).close()
    sync = Sync(algorithm="ring", bucket_bytes=(64,)) if world.rank else Sync()
    PlannedStep(model, loss_fn, optimizer, Plan(workers=2, accumulate=1 + world.rank, sync=sync))


def other_clipping(world: World) -> None:
    """The plan is the same, and one worker clips its gradients."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clip_norm = 0.5 if world.rank else None
    PlannedStep(model, loss_fn, optimizer, Plan(workers=2, accumulate=2), clip_norm=clip_norm)


def wrapped(world: World) -> None:
    """The model averages its gradients itself, and a plan is to be chosen."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    rl.TrainStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), device="cpu")


def wrapped_in_the_loss(world: World) -> None:
    """The loss calls the wrapper by its own name; of a network that another step trains it may."""
    other = DistributedDataParallel(nn.Linear(4, 4))

    def judged(model: nn.Module, batch: Any) -> Tensor:
        return other(model(batch[0])).square().mean()

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    PlannedStep(model, judged, optimizer, Plan(workers=world.size)).close()
    optimizer = torch.optim.SGD(other.module.parameters(), 0.1)
    PlannedStep(other.module, judged, optimizer, Plan(workers=world.size))


def fully_sharded(world: World) -> None:
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (world.size,)))
    train(model, world)


def split(world: World) -> None:
    """Each worker holds some columns of a layer."""
    mesh = init_device_mesh("cpu", (world.size,))
    train(parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()}), world)


def split_buffer(world: World) -> None:
    """Each worker holds some elements of a mask."""
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (world.size,))
    model.register_buffer("mask", distribute_tensor(torch.ones(4), mesh))
    train(model, world)


def train(
    model: nn.Module,
    world: World,
    change: Callable[[], object] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Two steps, and a change between them."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, loss_fn, optimizer, Plan(workers=world.size)) as step:
        shape = (3, 2, 4, 4) if isinstance(model, nn.Conv2d) else (3, 4)
        step((torch.randn(shape),))
        change()
        step((torch.randn(shape),))


def messages_of(world: World) -> dict[str, str]:
    """The message of each case."""
    messages = {}
    cases = (
        *(other_plans, other_clipping, other_strides, unfrozen, twice),
        *(late, outside, replaced, interrupted, wrapped, wrapped_in_the_loss, fully_sharded, split),
        split_buffer,
    )
    for case in cases:
        torch.manual_seed(0)
        try:
            case(world)
        except (WorkloadError, PlanError) as error:
            messages[case.__name__] = str(error)
    return messages
