"""A model that the script itself has given to `torch.compile`, as many training scripts do."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = [
    pytest.mark.usefixtures("interpreted", "compiler_begins_anew"),
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd"),
]


class Doubling(nn.Module):
    """Reads what a script may set between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.doubles = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found + found if self.doubles else found


def _loss(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


@pytest.mark.parametrize("execution", ["step-graph", "graph", "model-graph"])
def test_it_is_traced_and_captured_as_it_was_written(execution: Any) -> None:
    """And what its code reads is looked at; torch refused to trace it, and Python drew numbers as it compiled."""
    torch.manual_seed(0)
    written = Doubling()
    batches = torch.randn(7, 5, 4)
    losses = []
    for plan in (Plan(), Plan(execution=execution)):
        model = copy.deepcopy(written)
        given: Any = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(given.parameters(), 0.1, momentum=0.9)
        with emulated_graphs(), PlannedStep(given, _loss, optimizer, plan) as step:
            found = []
            for number, batch in enumerate(batches):
                model.doubles = number >= 4
                found.append(step(batch))
            assert step.recorder.counts.get("eager_steps", 0) <= 2
        losses.append(torch.stack(found))
    torch.testing.assert_close(*losses)
