"""A check of a step passes what is rounding, names it, and lets nothing pass that is wrong by one percent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import EquivalenceError
from ridgeline.plan import Plan
from ridgeline.runtime.body import StepBody
from ridgeline.runtime.capturable import LearningRates
from ridgeline.runtime.clocks import HostClock
from ridgeline.runtime.equivalence import check_replay
from ridgeline.runtime.recorder import Recorder
from ridgeline.runtime.world import World

Loss = Callable[[nn.Module, Any], Tensor]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01),
}


class Backward(torch.autograd.Function):
    """The same values, and gradients that are a factor too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 4))


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :4]).square().mean()


def in_another_order(model: nn.Module, batch: Tensor) -> Tensor:
    """The same maths from samples in another order: every sum is rounded otherwise."""
    turned = batch.flip(0)
    return (model(turned) - turned[:, :4]).square().mean()


def checked(replayed: Loss, optimizer: str, num_before: int, rate: float = 1.0) -> list[str]:
    """Notes of the check of a step whose loss is another one, and whose learning rate is a multiple.

    It comes after `num_before` steps: with none the optimizer has no state yet.
    """
    model = made()
    made_optimizer = OPTIMIZERS[optimizer](model.parameters())
    world = World.join(device="cpu")
    body, other = (
        StepBody(model, loss, made_optimizer, Plan(), None, clip_norm=None, device=world.device)
        for loss in (mean_square, replayed)
    )
    batch = torch.randn(64, 8)
    for _ in range(num_before):
        body(batch, Recorder(HostClock()))
    rates, notes = LearningRates(made_optimizer), list[str]()

    def replay() -> Tensor:
        rates.scale(rate)
        loss = other(batch, Recorder(HostClock()))
        rates.scale(1.0 / rate)
        return loss

    check_replay(body, batch, [batch], rates, replay, world=world, notes=notes)
    return notes


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounding_passes_and_is_named(optimizer: str, num_before: int) -> None:
    """Biases before batch norm have gradients of rounding alone, which Adam turns into whole steps."""
    notes = checked(in_another_order, optimizer, num_before)
    assert "equals the eager step within" in notes[-1]
    assert notes[0] == (
        "rounding alone decides the update of 0.bias, 3.bias, so this was not compared"
    )


WRONG: dict[str, Loss] = {
    "factor of the loss": lambda model, batch: 1.01 * in_another_order(model, batch),
    "gradient of a layer": lambda model, batch: (
        (model[6](Backward.apply(model[:6](batch), 1.01)) - batch[:, :4]).square().mean()  # type: ignore[index]
    ),
    "constant of the model": lambda model, batch: (
        (1.01 * model(batch) - batch[:, :4]).square().mean()
    ),
}


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wrong", WRONG)
def test_one_percent_is_caught(wrong: str, optimizer: str, num_before: int) -> None:
    """In the loss, or where only gradients show it; noise beside it hides nothing."""
    with pytest.raises(EquivalenceError, match="something in the step is baked in"):
        checked(WRONG[wrong], optimizer, num_before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_learning_rate_that_is_one_percent_too_high_is_caught(optimizer: str) -> None:
    """The update of all elements shows it that are not rounding."""
    with pytest.raises(EquivalenceError, match="something in the step is baked in"):
        checked(in_another_order, optimizer, 2, rate=1.01)
