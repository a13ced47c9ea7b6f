"""A captured model of which a loss uses another result in each step; graphs are emulated on the CPU."""

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep

NUM_STEPS = EAGER_STEPS + 7


class Heads(nn.Module):
    """One trunk, a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both tasks."""
        hidden = torch.tanh(self.trunk(x))
        return self.one(hidden), self.other(hidden)


def by_task(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of the task that the batch names."""
    one, other = model(batch[0])
    return (other if batch[1].item() > 50 else one).square().mean()


class Both:
    """The losses of both tasks, of which Python leaves the other out in some steps."""

    def __init__(self, without: range) -> None:
        self.without, self.has_other = without, True

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        one, other = model(batch)
        return one.square().mean() + (other.square().mean() if self.has_other else 0.0)


def trained(execution: Execution, without: range | None = None) -> tuple[list[Tensor], list[int]]:
    """Parameters after some steps, and how many had a gradient in each; of tasks in turn without a range."""
    torch.manual_seed(0)
    model, both = Heads(), None if without is None else Both(without)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    loss_fn, plan, graded = both or by_task, Plan(execution=execution), list[int]()
    with (
        interpreted(),
        emulated_graphs(),
        PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step,
    ):
        for number in range(NUM_STEPS):
            x = torch.full((3, 4), 0.1 * number)
            if both is not None:
                both.has_other = number not in both.without
            step((x, torch.tensor(100.0 * (number % 2))) if both is None else x)
            graded.append(sum(p.grad is not None for p in model.parameters()))
    return [p.detach() for p in model.parameters()], graded


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
@pytest.mark.parametrize("execution", ["model-graph", "compiled+model-graph"])
def test_a_head_that_a_step_leaves_out_gets_no_gradient(execution: Execution) -> None:
    """Nor zeros, which momentum and weight decay would follow."""
    wanted, got = trained("eager"), trained(execution)
    assert got[1] == wanted[1]
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
@pytest.mark.parametrize("without", [range(6, NUM_STEPS), range(NUM_STEPS), range(5)])
@pytest.mark.parametrize(
    "execution", ["model-graph", "compiled+model-graph", "graph", "step-graph"]
)
def test_a_head_that_python_leaves_out_does_not_move(execution: Execution, without: range) -> None:
    """From some step on, always, or at first."""
    wanted, got = trained("eager", without), trained(execution, without)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)
