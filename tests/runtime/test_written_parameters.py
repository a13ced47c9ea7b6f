"""Models that write into their own parameters, replayed as graphs; these are emulated on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.model_graphs.form import FIRST_CALLS
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

Write = Callable[[nn.Parameter, Tensor], None]
MODES = ("model-graph", "compiled+model-graph")


def move(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.data = values


def fill(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.data.copy_(values)


def multiply(parameter: nn.Parameter, values: Tensor) -> None:
    parameter.data.mul_(values)


class SetUp(nn.Module):
    """Takes its scale from a batch, as an ActNorm does, in one call of a number."""

    def __init__(self, write: Write, at: int) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.write, self.at, self.is_set = write, at, False

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        if self.at == 0 and not self.is_set:
            self.write(self.scale, 1 / (y.detach().std(0) + 1))
            self.is_set = True
        return y * self.scale


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trained(execution: Execution, write: Write, at: int) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    model = SetUp(write, at)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan, found = Plan(execution=execution), list[Tensor]()
    with (
        emulated_graphs(),
        interpreted(),
        PlannedStep(model, squared, optimizer, plan, device="cpu") as step,
    ):
        for number in range(at + 3):
            model.at = at - number
            generator = torch.Generator().manual_seed(number)
            found += [step(torch.randn(3, 4, generator=generator)), model.scale.detach().clone()]
        notes = step.notes
    return found, notes


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", MODES)
@pytest.mark.parametrize("write", [move, fill, multiply])
@pytest.mark.parametrize("at", [0, 2])
def test_what_one_call_sets_up_is_set_up_once(execution: Execution, write: Write, at: int) -> None:
    """That call runs as it was written, and trains like any other; so little tells the check apart."""
    found, notes = trained(execution, write, at)
    torch.testing.assert_close(found, trained("eager", write, at)[0])
    assert FIRST_CALLS in notes
    assert "in distribution" not in notes[0]
