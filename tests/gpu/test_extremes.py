"""On a GPU, too, compiled gradients of extremes in 16 bits are those of the step as written."""

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class EdgeConvolution(nn.Module):
    """The largest of what each neighbour gives, as networks on point clouds have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            nn.Conv2d(6, 64, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2)
        )
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x).amax(3).mean(2))


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def trained(execution: Execution) -> list[Tensor]:
    torch.manual_seed(0)
    model = EdgeConvolution().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    batch = torch.randn(8, 6, 128, 20, generator=torch.Generator().manual_seed(1)).cuda()
    plan = Plan(execution=execution, precision="bf16")
    with PlannedStep(model, mean_square, optimizer, plan, device="cuda") as step:
        for _ in range(6):
            step(batch)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("execution", ["compiled", "compiled+graph", "step-graph"])
def test_gradients_of_the_largest_neighbour_are_numbers(execution: Execution) -> None:
    """Kernels round the elements to the 16 bits of the largest, with which they compare them."""
    for got, wanted in zip(trained(execution), trained("eager"), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=5e-3)
