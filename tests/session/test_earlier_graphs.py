"""A loss that goes back through what ran before the step, as that of a policy which has acted, is never run again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from adversary.interpreting import interpreted
from ridgeline.errors import SideEffectError
from strategies import make_machine

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
WANTED = (
    "wanted a step that can be run again, got a loss that goes back through what was computed before it (kept "
    "in saved), which one backward pass frees; compute it within the loss function, or use execution='eager'"
)


class Policy(nn.Module):
    """Keeps the log probabilities of its actions until it learns from them, as torch's examples have it."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 2)
        self.saved: list[tuple[Tensor, float]] = []
        self.last: Tensor | None = None

    def act(self, state: Tensor) -> None:
        self.last = self.scores(state)
        self.saved.append((self.last.log_softmax(-1)[0], 0.0))  # and what it is worth


def loss_of_episode(model: Any, rewards: Tensor) -> Tensor:
    loss = -(torch.stack([score for score, _ in model.saved]) * rewards).sum()
    model.saved.clear()
    return loss


def loss_of_batch(model: Any, batch: Tensor) -> Tensor:
    """Leaves the policy what `act` has left, and reads none of it."""
    loss: Tensor = model.scores(batch).square().mean()
    return loss


def made() -> tuple[Policy, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Policy()
    return model, torch.optim.Adam(model.parameters(), 0.01)


def episodes(model: Policy, step: Any) -> list[float]:
    draws = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        for _ in range(3):
            model.act(torch.randn(4, generator=draws))
        losses.append(float(step(torch.rand(3, generator=draws))))
    return losses


def plain_losses() -> tuple[list[float], Policy]:
    model, optimizer = made()

    def step(rewards: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of_episode(model, rewards)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return episodes(model, step), model


def test_auto_trains_it_as_it_was_written() -> None:
    """To the bit, with the reason; a trial would free what the step needs."""
    wanted, trained = plain_losses()
    model, optimizer = made()
    machine = make_machine()
    with rl.TrainStep(model, loss_of_episode, optimizer, machine=machine, device="cpu") as step:
        assert episodes(model, step) == wanted
        assert step.plan.execution == "eager"
        assert step.notes[0].endswith(WANTED)
    torch.testing.assert_close(model.state_dict(), trained.state_dict(), rtol=0, atol=0)


def test_a_mode_that_is_checked_refuses_it() -> None:
    """Before anything was gone back through: the same batch can be trained on eagerly."""
    wanted, _ = plain_losses()
    model, optimizer = made()
    plan = rl.Plan(execution="compiled")

    def refused_once(rewards: Tensor) -> Tensor:
        with (
            interpreted(),
            rl.TrainStep(model, loss_of_episode, optimizer, plan, device="cpu") as compiled,
            pytest.raises(SideEffectError) as caught,
        ):
            compiled(rewards)
        assert str(caught.value) == WANTED
        with rl.TrainStep(model, loss_of_episode, optimizer, rl.Plan(), device="cpu") as step:
            return step(rewards)

    draws = torch.Generator().manual_seed(1)
    for _ in range(3):
        model.act(torch.randn(4, generator=draws))
    assert float(refused_once(torch.rand(3, generator=draws))) == wanted[0]


def test_what_no_step_reads_is_no_reason() -> None:
    """A result with its graph that was left in the model."""
    model, optimizer = made()
    model.act(torch.ones(4))
    plan = rl.Plan(execution="compiled")
    with (
        interpreted(),
        rl.TrainStep(model, loss_of_batch, optimizer, plan, device="cpu") as step,
    ):
        assert torch.isfinite(step(torch.ones(2, 4)))


class Heads(nn.Module):
    """Keeps the parts of its weight, written since: torch tells of none of them how it was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 2)
        self.parts = self.scores.weight.chunk(2)
        with torch.no_grad():
            self.parts[0].mul_(2)


def test_a_view_without_a_known_origin_is_no_earlier_result() -> None:
    """No backward pass can go through it, so a step may be run again, as it was written."""
    losses = []
    for execution in ("eager", "step-graph"):
        torch.manual_seed(0)
        model = Heads()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = rl.Plan(execution=execution)
        with (
            interpreted(),
            rl.TrainStep(model, loss_of_batch, optimizer, plan, device="cpu") as step,
        ):
            losses.append([float(step(torch.ones(2, 4))) for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0])
