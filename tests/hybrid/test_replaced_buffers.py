"""A step as one program, and state that somebody replaces and has under another name as well."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.runner import ONE_FRAME
from ridgeline.tensors.nests import tensors_in


class Scaled(nn.Module):
    """A layer, and a buffer that scales what it gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.sum()


class Registering(Scaled):
    """Registers a buffer anew in each call."""

    def __init__(self, *, is_saved: bool) -> None:
        super().__init__()
        self.is_saved = is_saved

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("seen", 2 * x.detach(), persistent=self.is_saved)
        return super().forward(x) * self.seen.mean()


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda kept: kept,
    "detached": Tensor.detach,
    "a view": lambda kept: kept.view(2),
    "a copy": Tensor.clone,
}
"""What the model gets of a tensor that somebody keeps, and writes into later."""


def losses(show: Callable[[Tensor], Tensor], *, is_plain: bool) -> tuple[list[float], list[str]]:
    """Of eight steps, and the step's notes; the buffer is replaced before the fifth."""
    model, x = Scaled(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(execution="eager" if is_plain else "step-graph")
    found = []
    with PlannedStep(model, mean_square, optimizer, plan, device="cpu") as step:
        for index in range(8):
            if index == 4:
                kept = torch.full((2,), 2.0)
                model.scale = show(kept)
            if index > 4:
                kept.mul_(0.5)
            found.append(float(step(x)))
        return found, step.notes


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_written_into_a_buffer_by_another_name_is_seen(
    interpreted: None, name: str
) -> None:
    """A program with the buffer's values of before would train with those."""
    wanted, _ = losses(SHOWN[name], is_plain=True)
    got, notes = losses(SHOWN[name], is_plain=False)
    assert got == pytest.approx(wanted, rel=1e-5)
    compiled_again = any("compiled again" in note for note in notes)
    assert compiled_again is (name in ("detached", "a view"))


def _swap_scale(model: Scaled, kept: dict[str, Any], index: int) -> None:
    if index == 4:
        kept["scale"], model.scale = model.scale, torch.full((2,), 3.0)
    if index == 6:
        model.scale = kept["scale"]


def _swap_state(optimizer: Optimizer, kept: dict[str, Any], index: int) -> None:
    if index == 4:
        kept["state"] = optimizer.state_dict()  # the very tensors
        kept["other"] = copy.deepcopy(kept["state"])
        for state in kept["other"]["state"].values():
            state["momentum_buffer"].mul_(-5)
    if index in (4, 5, 7):
        optimizer.load_state_dict(kept["state" if index == 7 else "other"])


@pytest.mark.parametrize("what", ["a buffer", "optimizer state"])
def test_what_is_put_back_is_as_it_was(interpreted: None, what: str) -> None:
    """Neither written over by what stood there in between, nor spared the training that it was in for."""
    found, trained = [], []
    for execution in ("eager", "step-graph"):
        model, kept, losses_of = Scaled(), dict[str, Any](), list[float]()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        plan = Plan(execution=execution)
        with PlannedStep(model, mean_square, optimizer, plan, device="cpu") as step:
            for index in range(9):
                if what == "a buffer":
                    _swap_scale(model, kept, index)
                else:
                    _swap_state(optimizer, kept, index)
                losses_of.append(float(step(x)))
            assert not any("compiled again" in note for note in step.notes)
        found.append(losses_of)
        trained.append([t for t in tensors_in(kept) if t.is_floating_point()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    torch.testing.assert_close(trained[1], trained[0])


@pytest.mark.parametrize("is_saved", [True, False])
def test_buffers_registered_in_each_call_are_those_of_a_plain_loop(
    interpreted: None, is_saved: bool
) -> None:
    """As masks of a batch and what attention saw often are; saved or not."""
    found = []
    for execution in ("eager", "step-graph"):
        model = Registering(is_saved=is_saved)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(1)
        plan = Plan(execution=execution)
        with PlannedStep(model, mean_square, optimizer, plan, device="cpu") as step:
            losses = [step(torch.randn(3, 4, generator=generator)).clone() for _ in range(4)]
            assert step.notes[-1:] == ([ONE_FRAME] if execution == "step-graph" else [])
        found.append([*losses, *model.parameters(), *model.buffers()])
    torch.testing.assert_close(found[1], found[0])
