"""What is drawn again from random state that was put back: no program does that, whoever owns the numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ridgeline as rl
from ridgeline.errors import CaptureError

REFUSAL = (
    "wanted a step that draws each random number once, got some that are drawn again from random state that "
    "was put back (an activation checkpoint with dropout inside), which no program does; leave dropout "
    "outside of checkpoints, or use execution='compiled' or 'eager'"
)


class Checkpointed(nn.Module):
    """Dropout inside of a checkpoint, or behind it."""

    def __init__(self, *, is_inside: bool) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 5)
        self.is_inside = is_inside

    def forward(self, x: Tensor) -> Tensor:
        if self.is_inside:
            return self.last(checkpoint(lambda x: self.drop(self.first(x)), x, use_reentrant=False))
        return self.last(self.drop(checkpoint(self.first, x, use_reentrant=False)))


def traced(model: nn.Module) -> Any:
    from ridgeline.runtime.steps.whole_step.program import trace_step

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return trace_step(model, lambda m, b: m(b).square().mean(), optimizer, torch.randn(4, 6))


def test_dropout_inside_of_a_checkpoint_is_refused() -> None:
    """And the call that puts state back is torch's own again."""
    right = torch.random.fork_rng
    with pytest.raises(CaptureError) as refused:
        traced(Checkpointed(is_inside=True))
    assert str(refused.value) == REFUSAL
    assert torch.random.fork_rng is right


def test_dropout_beside_a_checkpoint_is_not() -> None:
    """Its numbers are drawn once."""
    assert traced(Checkpointed(is_inside=False)).num_random_ops == 1


def test_numbers_of_a_programs_own_are_no_excuse() -> None:
    """A comparison in distribution would let gradients of two different masks pass."""
    model = Checkpointed(is_inside=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = rl.Plan(execution="step-graph", random="compiled")
    with rl.TrainStep(
        model, lambda m, b: m(b).square().mean(), optimizer, plan, device="cpu"
    ) as step:
        step(torch.randn(4, 6))  # before the program is made
        with pytest.raises(CaptureError) as refused:
            step(torch.randn(4, 6))
    assert str(refused.value) == REFUSAL
