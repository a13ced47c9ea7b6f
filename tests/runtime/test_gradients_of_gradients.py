"""A penalty on gradients, as critics have: a captured model has none of its gradients, and says so."""

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.session import TrainStep


def penalty(model: nn.Module, batch: Tensor) -> Tensor:
    """What keeps the slope of a critic near one."""
    points = batch.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + model(batch).mean()


def test_a_captured_model_is_not_differentiated_twice() -> None:
    """Autograd would take what was replayed for constants, and leave a part of the gradients out."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        emulated_graphs(),
        TrainStep(model, penalty, optimizer, Plan(execution="model-graph"), device="cpu") as step,
        pytest.raises(
            CaptureError, match="create_graph=True, and the graph that is replayed has none"
        ),
    ):
        [step(torch.ones(5, 3)) for _ in range(6)]
