"""Worker script: parameters of unusual types, or changed between steps, and steps that are refused, on two workers over gloo.

torchrun --nproc-per-node 2 dtype_cases.py OUTPUT
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World

STEPS = 5


def planned(**knobs: Any) -> Plan:
    return Plan(workers=2, threads=1, sync=Sync(**knobs))


def complex_parameters(world: World, algorithm: str) -> dict[str, Any]:
    """How far the workers' parameters are from those of one process with all samples."""
    torch.manual_seed(0)
    batches = torch.randn(STEPS, 4, 3, dtype=torch.complex64)
    model, alone = (nn.Linear(3, 2, dtype=torch.complex64) for _ in range(2))
    alone.load_state_dict(model.state_dict())

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch).abs().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with PlannedStep(model, loss, optimizer, planned(algorithm=algorithm), world=world) as step:
        for batch in batches:
            step(batch[world.rank :: 2])
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss(alone, batch).backward()
        optimizer.step()
    return {"error": float((model.weight - alone.weight).abs().max())}


def frozen(world: World, dtype: torch.dtype, *, every: int) -> dict[str, Any]:
    """What a frozen parameter holds that each worker made otherwise, and that the step counts up."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    codes = nn.Parameter(torch.full((3,), 2.0 + world.rank).to(dtype), requires_grad=False)
    model.register_parameter("codes", codes)

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        if every > 1:
            codes.copy_((codes.float() + 1 + world.rank).to(dtype))
        return net(batch).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with PlannedStep(model, loss, optimizer, planned(every=every), world=world) as step:
        step(torch.ones(2, 3))
        step(torch.ones(2, 3))
    return {"held": codes.float().tolist()}


def clipped(world: World, dtype: torch.dtype, gradient: float) -> dict[str, Any]:
    """The length of an update of which one worker has no part, clipped to 1."""
    model = nn.Linear(2, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = planned(algorithm="sharded")

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch).sum()

    with PlannedStep(model, loss, optimizer, plan, world=world, clip_norm=1.0) as step:
        step(torch.full((1, 2), gradient, dtype=dtype))
    return {"length": float(model.weight.float().norm())}


def refused(
    world: World, plan: Plan, *, is_hooked: bool, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Hooks on the parameters of a step that was refused."""
    model = nn.Linear(4, 4, dtype=dtype)
    others = [] if is_hooked or dtype.is_complex else [nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD([*model.parameters(), *others], lr=0.1)
    if is_hooked:
        optimizer.register_step_post_hook(lambda *_: None)
    try:
        PlannedStep(model, lambda net, b: net(b).sum(), optimizer, plan, world=world).close()
    except RidgelineError as error:
        hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
        return {"told": str(error), "num_hooks": sum(hooks)}
    return {"told": "", "num_hooks": 0}


def changed(world: World, change: Callable[[nn.Module], object], **knobs: Any) -> dict[str, Any]:
    """How far parameters are from those of one process with all samples, where a script changes a module."""
    torch.manual_seed(0)
    batches = torch.randn(4, 4, 3)
    model, alone = (nn.Sequential(nn.Linear(3, 2)) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)

    def loss(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch.to(net[0].bias.dtype)).square().mean()  # type: ignore[index]

    with PlannedStep(model, loss, optimizer, planned(**knobs), world=world) as step:
        for number, batch in enumerate(batches):
            if number == 2:
                change(model)
                change(alone)
            try:
                step(batch[world.rank :: 2])
            except RidgelineError as error:
                return {"told": f"{type(error).__name__}: {error}"}
            plain.zero_grad()
            loss(alone, batch).backward()
            plain.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return {"error": max(float((one - other).abs().max()) for one, other in pairs)}


class Halved(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def parametrize(model: nn.Module) -> None:
    register_parametrization(model[0], "weight", Halved())  # type: ignore[index]


SHAPED: tuple[dict[str, Any], ...] = ({}, {"algorithm": "kvstore"}, {"every": 2})


def grow(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.cat([parameter.data, parameter.data])


def cases(world: World) -> dict[str, Any]:
    return {
        "complex, all_reduce": complex_parameters(world, "all_reduce"),
        "complex, ring": complex_parameters(world, "ring"),
        "int16": frozen(world, torch.int16, every=1),
        "float8": frozen(world, torch.float8_e4m3fn, every=1),
        "int16, written": frozen(world, torch.int16, every=2),
        "float8, written": frozen(world, torch.float8_e4m3fn, every=2),
        "changed, all_reduce": changed(world, parametrize),
        "changed, sharded": changed(world, parametrize, algorithm="sharded"),
        "changed, kvstore": changed(world, parametrize, algorithm="kvstore"),
        "changed, type": changed(world, nn.Module.double),
        "changed, shape": [changed(world, grow, **knobs) for knobs in SHAPED],
        "clipped bfloat16": clipped(world, torch.bfloat16, 16.0),
        "clipped float16": clipped(world, torch.float16, 1024.0),
        "clipped float64": clipped(world, torch.float64, 16.0),
        "refused, other": refused(world, planned(algorithm="ring"), is_hooked=False),
        "refused, compressed": refused(
            world, planned(compression="int8"), is_hooked=False, dtype=torch.complex64
        ),
        "refused, held": refused(
            world, planned(options={"held": 1}, bucket_bytes=(16, 16)), is_hooked=True
        ),
    }


def main() -> None:
    world = World.join(threads=1, device="cpu")
    told = [json.loads(one) for one in gather_bytes(json.dumps(cases(world)).encode(), world)]
    if not world.rank:
        Path(sys.argv[1]).write_text(json.dumps(told))
    World.leave()


if __name__ == "__main__":
    main()
