"""Blocks compiled one by one inside a graph: what lies between them runs as in the capture from the first step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        hidden = torch.relu(self.linear(x))
        return x + (hidden if mask is None else hidden * mask)


class Masked(nn.Module):
    """Makes a mask where it is captured, as models of transformers do, and leaves it out elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        is_traced = torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing()
        mask = torch.ones_like(x) if is_traced else None
        for block in self.blocks:
            x = block(x, mask)
        return x


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("is_undone", [True, False])
def test_code_that_asks_whether_it_is_captured(is_undone: bool) -> None:
    """Nothing is compiled within the capture, which would end it."""
    losses = []
    for execution in ("eager", "regional+graph"):
        torch.manual_seed(0)
        model = Masked().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batch = torch.randn(8, 16).cuda()
        plan = Plan(execution=execution)
        with PlannedStep(model, loss_fn, optimizer, plan, is_undone=is_undone) as step:
            losses.append([step(batch).item() for _ in range(EAGER_STEPS + 3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
