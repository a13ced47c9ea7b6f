"""Losses that are trained with the model: their parameters are part of a step as one program."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_pairs import batch_of, make
from torch import Tensor, nn

from ridgeline.errors import EquivalenceError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.usefixtures("interpreted")


class Weighted(nn.Module):
    """Two losses, each with an uncertainty that is learned; one of them has a scale in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.uncertainty = nn.Parameter(torch.zeros(2))
        self.scales = [nn.Parameter(torch.ones(()))]

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch["x"])
        losses = torch.stack(
            [
                nn.functional.cross_entropy(scores * self.scales[0], batch["y"]),
                scores.square().mean(),
            ]
        )
        return (losses * self.uncertainty.neg().exp() + self.uncertainty).sum()


def double(loss: Weighted) -> None:
    with torch.no_grad():
        loss.scales[0].mul_(2.0)


def move(loss: Weighted) -> None:
    loss.uncertainty.data = torch.ones(2)


def freeze(loss: Weighted) -> None:
    loss.scales[0].requires_grad_(False)


def trained(execution: Any, change: Callable[[Weighted], Any]) -> list[Tensor]:
    """Losses, and what is trained, of six steps; half way something changes."""
    model, loss = make(dropout=0.0), Weighted()
    held = [*model.parameters(), loss.uncertainty, *loss.scales]
    optimizer = torch.optim.AdamW(held, 0.02)
    with PlannedStep(model, loss, optimizer, Plan(execution=execution), device="cpu") as step:
        found = []
        for index in range(6):
            if index == 3:
                change(loss)
            found.append(step(batch_of(index)))
        runs = step.timeline().counters
    assert runs.get("eager_steps", 0) <= 1
    return [*found, *(one.detach() for one in held)]


@pytest.mark.parametrize("change", [double, move, freeze])
def test_what_a_loss_learns_in_one_program(change: Callable[[Weighted], Any]) -> None:
    """In a module and in a list: changed in place, moved to other memory, and no longer trained."""
    for mine, theirs in zip(trained("step-graph", change), trained("eager", change), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_parameter_of_the_loss_that_another_optimizer_trains_is_named() -> None:
    """Its gradients stay in the program."""
    model, loss = make(), Weighted()
    held = [*model.parameters(), *loss.scales]
    optimizer = torch.optim.SGD(held, 0.1)
    with PlannedStep(model, loss, optimizer, Plan(execution="step-graph"), device="cpu") as step:
        for index in range(2):
            step(batch_of(index))
        named = "such as one of shape (2,) that the loss function reads; where another"
        assert any(named in note for note in step.notes)


class Listed(nn.Module):
    """A product of matrices, which it reads from a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 4))
        self.second = nn.Parameter(torch.randn(4, 4))
        self.matrices = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x @ matrix
        return x


def test_trained_parameters_that_the_code_finds_in_a_list_are_named() -> None:
    """One program would not train them: the refusal says which, and not that a number is baked in."""
    model = Listed()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    plan = Plan(execution="step-graph")
    with PlannedStep(model, listed_loss, optimizer, plan, device="cpu") as step:
        step(batch_of(0))
        with pytest.raises(
            EquivalenceError, match=r"got first, second, which it also finds elsewh"
        ):
            step(batch_of(1))


def listed_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"]).square().mean()
