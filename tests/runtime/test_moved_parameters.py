"""Steps that graphs replay, whose parameters move just before they are captured."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.plan import Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    with emulated_graphs():
        yield


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("moved_at", [EAGER_STEPS - 1, EAGER_STEPS, EAGER_STEPS + 2])
def test_momentum_follows_parameters_into_another_memory_format(moved_at: int) -> None:
    """Before the last step as written, before the capture, and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2))
    images = torch.randn(8, 3, 4, 6, 6)
    losses = []
    for execution in ("eager", "graph"):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), 0.05, momentum=0.9)
        found = []
        with PlannedStep(copied, _loss, optimizer, Plan(execution=execution)) as step:
            for number, batch in enumerate(images):
                if number == moved_at:
                    copied.to(memory_format=torch.channels_last)
                found.append(step(batch))
        losses.append(torch.stack(found))
    torch.testing.assert_close(*losses)
