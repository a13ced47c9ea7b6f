"""Gradients through values that the forward pass also writes into a buffer are those of the eager step."""

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Execution, Plan
from ridgeline.programs import inductor
from ridgeline.runtime.steps.step import PlannedStep


class Counting(nn.Module):
    """Divides by how often it was called, and by an average of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("size", torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.size.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        y = torch.tanh(self.first(x)) / self.count
        return self.last(y / self.size.view(4)[:1])


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("owns_random", [False, True])
def test_gradients_through_written_buffers_are_right(owns_random: bool) -> None:
    """For the first shape, and for another one."""
    plain, mine = Counting(), Counting()
    compiled = torch.compile(loss_fn, **inductor.plain_arguments(owns_random=owns_random))
    for rows in (3, 3, 1, 5):
        x = torch.randn(rows, 4)
        wanted = gradients(plain, loss_fn(plain, x))
        torch.testing.assert_close(gradients(mine, compiled(mine, x)), wanted)


@pytest.mark.parametrize("execution", ["compiled", "step-graph"])
def test_steps_train_as_written(execution: Execution) -> None:
    """Also by optimizers whose update hides the scale of gradients."""
    plain, mine = Counting(), Counting()
    optimizers = [torch.optim.RMSprop(model.parameters(), 0.01) for model in (plain, mine)]
    with PlannedStep(mine, loss_fn, optimizers[1], Plan(execution=execution), device="cpu") as step:
        for rows in (3, 3, 3, 1):
            x = torch.randn(rows, 4)
            optimizers[0].zero_grad()
            loss = loss_fn(plain, x)
            loss.backward()
            optimizers[0].step()
            torch.testing.assert_close(step(x), loss.detach())
    for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
        state = [o.state[p]["square_avg"] for o, p in zip(optimizers, (one, other), strict=True)]
        torch.testing.assert_close(state[1], state[0], rtol=1e-3, atol=1e-9)
