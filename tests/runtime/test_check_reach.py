"""What the check of a mode looks at and puts back: the batch that a step writes, a loss that is learned."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import EquivalenceError
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.plan import Plan
from ridgeline.reach.reach import Reach, contents
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.workers.world import World


class Learned(nn.Module):
    """A loss with a temperature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * self.temperature).square().mean()


def checked(loss_fn: Any, change: Callable[[], object]) -> str:
    """The note of a check of the eager step, after which `change` is called, against itself."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trained = [*model.parameters(), *(loss_fn.parameters() if loss_fn is LEARNED else ())]
    optimizer = torch.optim.SGD(trained, 0.1)
    world = World.join(device="cpu")
    body = StepBody(model, loss_fn, optimizer, Plan(), None, clip_norm=None, device=world.device)
    batch, notes = torch.randn(5, 4), list[str]()
    given = batch.clone()

    def replay() -> Tensor:
        loss = body(batch, Recorder(HostClock()))
        change()
        return loss

    rates = LearningRates(optimizer)
    check_replay(body, batch, [batch], rates, replay, world=world, notes=notes)
    assert torch.equal(batch, given)
    return notes[0]


LEARNED = Learned()


def nothing() -> None:
    """Leave the step as it is."""


def move_temperature() -> None:
    with torch.no_grad():
        LEARNED.temperature.add_(0.1)


def writing(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss that writes into its batch."""
    return model(batch.mul_(1.5)).square().mean()


def test_a_batch_that_the_step_writes() -> None:
    """Each run begins with the batch as it was, or a step would differ from itself and nothing be refused."""
    assert "equals the eager step within 0.0e+00 of the update" in checked(writing, nothing)


def test_parameters_of_a_learned_loss() -> None:
    """They are trained like the model's, and a mode that trains them otherwise is refused."""
    assert "equals the eager step within 0.0e+00 of the update" in checked(LEARNED, nothing)
    before = LEARNED.temperature.detach().clone()
    with pytest.raises(EquivalenceError, match="the change of temperature of a network"):
        checked(LEARNED, move_temperature)
    assert torch.equal(LEARNED.temperature, before)


def test_a_loss_that_names_what_is_assigned_later() -> None:
    """Such as the step that it is given to: its closure holds nothing while the step is made."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * len(step)

    found = Reach(nn.Linear(4, 3), loss_fn)
    assert loss_fn in found.functions
    assert contents(loss_fn.__closure__ or ()) == []
    step = "two"
    assert contents(loss_fn.__closure__ or ()) == [step]
