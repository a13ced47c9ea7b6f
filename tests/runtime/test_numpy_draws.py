"""Compiled steps draw NumPy's random numbers where the step as written does, as masks of audio are drawn."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from repeated_blocks import TanhBlock
from ridgeline.plan import Execution, Plan
from ridgeline.session import TrainStep


class Masked(nn.Module):
    """Frames are hidden by chance, which NumPy throws, before and after blocks that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TanhBlock(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = np.random.rand(*x.shape) < 0.3
            x = block(x.masked_fill(torch.from_numpy(hidden), 0.0))
        return x


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trained(execution: Execution) -> tuple[list[float], float]:
    """The losses of five steps, and the number that NumPy draws next."""
    torch.manual_seed(0)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(3, 4) for _ in range(5)]
    np.random.seed(7)
    step = TrainStep(model, mean, optimizer, Plan(execution=execution), device="cpu")
    losses = [step(batch).item() for batch in batches]
    return losses, np.random.rand()


@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_they_are_those_of_the_step_as_written(execution: Execution) -> None:
    """Traced, they were torch's, and the form was refused as unequal to the eager step."""
    wanted, following = trained("eager")
    losses, following_then = trained(execution)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert following_then == following
