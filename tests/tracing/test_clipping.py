"""Clipping is part of a traced step: the operators that a real one runs before its optimizer."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline as rl
from ridgeline.machine import Setting
from ridgeline.plan import Plan
from ridgeline.simulator.model import model_step
from ridgeline.workload import CLIPPING, Workload
from strategies import make_machine


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def traced(clip_norm: float | None, **more: Any) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), **more)
    return rl.trace(model, loss_fn, optimizer, torch.ones(3, 4), clip_norm=clip_norm)


class Seen(TorchDispatchMode):
    """Names of what runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_that_clips_has_what_torch_runs_for_it() -> None:
    """Between its backward pass and its optimizer, which are as without."""
    plain, clipped = traced(None), traced(1.0)
    clipping = [op for op in clipped.ops if op.module == CLIPPING]
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((8, 4), (8,), (2, 8), (2,))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Seen() as seen:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    assert [op.name for op in clipping] == seen.names
    assert {op.phase for op in clipping} == {"optimizer"}
    places = [index for index, op in enumerate(clipped.ops) if op.module == CLIPPING]
    assert places[0] == sum(op.phase != "optimizer" for op in clipped.ops)
    assert [op.key for op in plain.ops] == [op.key for op in clipped.ops if op.module != CLIPPING]


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_fused_optimizer_does_not_clip(clip_norm: float | None) -> None:
    """It takes the place of the optimizer's operators alone."""
    workload = msgspec.structs.replace(traced(clip_norm, foreach=False), device="cuda")
    setting = Setting(device="cuda")
    machine = make_machine(device="cuda", settings=[setting])
    plan = Plan(workers=1, optimizer="fused")
    pieces = model_step(machine, workload, plan, setting).pieces["optimizer"]
    clipping = [op.name for op in workload.ops if op.module == CLIPPING]
    assert [piece.name for piece in pieces] == [*clipping, "fused_optimizer"]


def test_the_step_of_a_script_is_traced_as_it_clips() -> None:
    """By `TrainStep(clip_norm=...)`."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rl.TrainStep(model, loss_fn, optimizer, Plan(), clip_norm=1.0, device="cpu") as step:
        step(torch.ones(3, 4))
        assert any(op.module == CLIPPING for op in step._describe().ops)
