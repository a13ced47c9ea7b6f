"""What is compiled for tensors of other types than were checked is checked before it trains."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.errors import EquivalenceError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep


class Counting(nn.Module):
    """Adds how often it was called to what it computes; in float64 compiled programs leave that out."""

    def __init__(self, size: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.register_buffer("count", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.inner[0].weight.dtype)
        self.count.add_(1.0)
        return self.inner(y + self.count)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 0.5).square().mean()


def assign_in_double(model: nn.Module) -> None:
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def losses(
    execution: Execution, size: tuple[int, ...], change: Callable[[nn.Module], object]
) -> list[float]:
    """Of four steps, with a change after the second."""
    torch.manual_seed(0)
    model = nn.Sequential(Counting(size), Counting(size))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    with PlannedStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu") as step:
        for number in range(4):
            if number == 2:
                change(model)
            found.append(float(step(torch.ones(3, 4))))
    return found


@pytest.mark.parametrize("change", [nn.Module.double, assign_in_double])
@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_a_program_for_other_types_that_is_wrong_trains_nothing(
    execution: Execution, change: Callable[[nn.Module], object]
) -> None:
    """It is refused by the check, as if it had been the first."""
    with pytest.raises(EquivalenceError, match="to equal the eager step"):
        losses(execution, (), change)


@pytest.mark.parametrize("execution", ["compiled", "regional"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # an interpreter is none
@interpreted()
def test_a_program_for_other_types_that_is_right_goes_on(execution: Execution) -> None:
    found = losses(execution, (1,), nn.Module.double)
    assert found == pytest.approx(losses("eager", (1,), nn.Module.double), rel=1e-5)
