"""Hooks on gradients that keep something in Python: the choice of a plan takes back what they did."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

import ridgeline as rl
from adversary.interpreting import interpreted
from ridgeline.errors import CaptureError


def after_accumulation(model: nn.Module, seen: list[Any]) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))


def on_gradients(model: nn.Module, seen: list[Any]) -> None:
    def keep(gradient: Tensor) -> None:
        seen.append(gradient.shape)

    for parameter in model.parameters():
        parameter.register_hook(keep)


def on_all_of_them(model: nn.Module, seen: list[Any]) -> None:
    def keep(gradients: Sequence[Tensor | None]) -> None:
        seen.append(len(gradients))

    register_multi_grad_hook([*model.parameters()], keep)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(
    ("register", "plan"),
    [
        (after_accumulation, "auto"),
        (on_gradients, "auto"),
        (on_all_of_them, "auto"),
        (on_all_of_them, rl.Plan(execution="compiled")),
    ],
    ids=["behind", "on each", "on all", "on all, compiled"],
)
def test_they_run_as_often_as_in_a_loop(
    register: Callable[[nn.Module, list[Any]], None], plan: Any
) -> None:
    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), []
    register(model, seen)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        interpreted(),
        rl.TrainStep(
            model,
            lambda model, batch: model(batch).square().mean(),
            optimizer,
            plan,
            device="cpu",
            seconds=2.0 if plan == "auto" else None,
        ) as step,
    ):
        step(torch.randn(5, 4))
        once = len(seen)
        assert once == (1 if register is on_all_of_them else 4)
        step(torch.randn(5, 4))
        assert len(seen) == 2 * once


@pytest.mark.parametrize("register", [after_accumulation, on_gradients])
def test_a_compiled_step_would_call_those_of_several_gradients_in_another_order(
    register: Callable[[nn.Module, list[Any]], None],
) -> None:
    """It is refused by name, and has called none; `plan="auto"` leaves it out."""
    model, seen = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), []
    register(model, seen)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        rl.TrainStep(
            model,
            lambda model, batch: model(batch).square().mean(),
            optimizer,
            rl.Plan(execution="compiled"),
            device="cpu",
        ) as step,
        pytest.raises(CaptureError, match="got 4 that change something in Python, on '"),
    ):
        step(torch.randn(5, 4))
    assert seen == []
