"""Sums with a factor of a product: averages of what a layer saw, as VQ-VAE and k-means write them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep


class Averaged(nn.Module):
    """Sums up codes of its inputs in a buffer, and divides by it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("average", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.average.mul_(0.9).add_(x.t() @ y.detach(), alpha=0.1)
        return torch.sub(torch.add(y @ self.average, x, alpha=0.5), x @ self.average, alpha=2.0)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("execution", ["compiled", "step-graph", "packaged"])
def test_factors_of_sums_are_kept(execution: Any) -> None:
    """Torch's compiler makes one call of the product and the sum, without the factor."""
    torch.manual_seed(0)
    model = Averaged()
    plain = copy.deepcopy(model)
    optimizer, own = (torch.optim.SGD(each.parameters(), 0.01) for each in (model, plain))
    with PlannedStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu") as step:
        for x in torch.randn(3, 16, 8):
            own.zero_grad()
            loss = loss_fn(plain, x)
            loss.backward()
            own.step()
            torch.testing.assert_close(step(x), loss.detach())
        assert step.plan.execution == execution
        assert any("equals the eager step" in note for note in step.notes), step.notes
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
