"""Results of a model that some losses use and some leave out: what is behind them alone gets no gradients."""

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.body(x))
        return self.one(features), self.two(features)


def trained(execution: Execution, without: range) -> list[Tensor]:
    """Parameters after some steps, in which momentum and weight decay move what has zeros for gradients."""
    torch.manual_seed(0)
    model, used = Heads(), [True]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        one, two = model(batch)
        return one.square().mean() + (two.square().mean() if used[0] else 0.0)

    with PlannedStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu") as step:
        for index in range(10):
            used[0] = index not in without
            step(torch.randn(6, 4, generator=torch.Generator().manual_seed(index)))
    return [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
@pytest.mark.parametrize("without", [range(6, 10), range(10), range(5)])
@pytest.mark.parametrize(
    "execution", ["model-graph", "compiled+model-graph", "graph", "step-graph"]
)
def test_a_head_that_is_left_out_does_not_move(execution: Execution, without: range) -> None:
    with interpreted(), emulated_graphs():
        wanted, got = trained("eager", without), trained(execution, without)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
