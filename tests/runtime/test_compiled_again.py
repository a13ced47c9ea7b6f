"""What is said to be compiled again is the step's own program: not one that a script compiles beside it."""

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

NUM_STEPS = 4


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # an interpreter is none
@pytest.mark.parametrize("execution", ["compiled", "model-graph", "compiled+model-graph"])
def test_what_a_script_compiles_is_not_the_steps(execution: Execution) -> None:
    """Each one counted as a change of a value in the step; so did what a replayed model is captured by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(execution=execution)
    with (
        emulated_graphs(),
        interpreted(),
        PlannedStep(model, mean, optimizer, plan, device="cpu") as step,
    ):
        for number in range(1, NUM_STEPS + 1):
            step(torch.ones(5, 3))
            torch.compile(lambda x, scale=number: x * scale, backend="eager")(torch.ones(2))
        assert "recompiles" not in step.timeline().counters
    assert not [note for note in step.notes if note.startswith("compiled again")]
