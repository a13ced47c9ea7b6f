"""Activation checkpoints keep random state on the host, which a capture refuses; what is compiled needs none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ridgeline as rl
from ridgeline.errors import CaptureError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Blocks(nn.Module):
    """Three blocks of which the backward pass computes the activations again, as large models are trained."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(dropout)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def losses(dropout: float, plan: rl.Plan) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = Blocks(dropout).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [torch.randn(16, 32, device="cuda") for _ in range(6)]
    torch.manual_seed(1)
    with rl.TrainStep(model, loss_fn, optimizer, plan=plan) as step:
        return [step(batch).item() for batch in batches], [*step.notes]


@pytest.mark.parametrize("random", ["as-is", "compiled"])
def test_without_draws(random: Any) -> None:
    """A child tries the capture first; the replays train as the step written does."""
    wanted, _ = losses(0.0, rl.Plan())
    plan = rl.Plan(execution="compiled+graph", random=random)
    got, notes = losses(0.0, plan)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    doubts = [note for note in notes if note.startswith("doubtful capture ran well in a child")]
    assert len(doubts) == 1
    assert "an activation checkpoint at " in doubts[0]
    assert "test_activation_checkpoints.py:" in doubts[0]


def test_with_draws_of_the_compiler() -> None:
    """Each replay drops others, and its backward pass the same: else the loss would not fall as it does."""
    got, _ = losses(0.2, rl.Plan(execution="compiled+graph", random="compiled"))
    wanted, _ = losses(0.2, rl.Plan())
    assert len(set(got)) == len(got)
    assert got[-1] == pytest.approx(wanted[-1], rel=0.2)


def test_operator_by_operator() -> None:
    """The capture of what is written is refused, with the line and what to do."""
    with pytest.raises(
        CaptureError, match="wanted activation checkpoints that keep no random state, got"
    ):
        losses(0.0, rl.Plan(execution="graph"))
