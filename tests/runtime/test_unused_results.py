"""A captured model of which a loss uses another result in each step; graphs are emulated on the CPU."""

import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep


class Heads(nn.Module):
    """One trunk, a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Both tasks."""
        hidden = torch.tanh(self.trunk(x))
        return self.one(hidden), self.other(hidden)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of the task that the batch names."""
    one, other = model(batch[0])
    return (other if batch[1].item() > 50 else one).square().mean()


def trained(execution: Execution) -> tuple[list[Tensor], list[int]]:
    """Parameters after steps on one task and then on both in turn; and when each has a gradient."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    graded = []
    with (
        emulated_graphs(),
        PlannedStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu") as step,
    ):
        for number in range(EAGER_STEPS + 6):
            step((torch.full((3, 4), 0.1 * number), torch.tensor(100.0 * (number % 2))))
            graded.append(sum(p.grad is not None for p in model.parameters()))
    return [p.detach() for p in model.parameters()], graded


def test_a_head_that_a_step_leaves_out_gets_no_gradient() -> None:
    """Nor zeros, which momentum and weight decay would follow."""
    wanted, got = trained("eager"), trained("model-graph")
    assert got[1] == wanted[1]
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-5, atol=1e-6)
