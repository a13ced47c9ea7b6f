"""Deques of a limited length, in which a model keeps a window over its steps."""

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.callables.calls.reads import CallReads
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")


class Net(nn.Module):
    """Scales by the numbers of its last calls."""

    def __init__(self, *, appends: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.window: collections.deque[float] = collections.deque([1.0, 2.0], maxlen=2)
        self.appends = appends

    def forward(self, x: Tensor) -> Tensor:
        """Scaled."""
        if self.appends:
            self.window.append(self.window[-1] + 1.0)
        return self.linear(x) * sum(self.window) * (self.window.maxlen or 1)


def _loss_fn(model: nn.Module, x: Any) -> Tensor:
    return model(x).square().mean()


def test_compiled_steps_drop_what_leaves_the_window() -> None:
    """Losses are those of the step as written."""
    x, losses = torch.randn(2, 4), []
    for execution in ("eager", "compiled"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        plan = Plan(execution=execution)  # type: ignore[arg-type]
        with interpreted(), PlannedStep(model, _loss_fn, optimizer, plan) as step:
            losses.append([float(step(x)) for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_deque_of_another_limit_is_another() -> None:
    """With the same elements."""
    model, x = Net(appends=False), torch.randn(2, 4)
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        assert guards.holds({"fn": model, "args": (x,)})
        model.window = collections.deque(model.window)
        assert not guards.holds({"fn": model, "args": (x,)})
