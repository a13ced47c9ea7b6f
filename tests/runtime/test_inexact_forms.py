"""Replayed steps train as the loop does from the first step on, whatever form an optimizer has for captures."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.optimizers.capturable import INEXACT
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

NAMES = ("SGD", "Adam", "AdamW", "Adamax", "Adadelta", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1.0).square().mean()


def trained(name: str, plan: Plan, begun: int = 0) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Parameters before and after ten steps, and what was noted; `begun` were made in a loop before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
    for index in range(begun):
        optimizer.zero_grad()
        squared(
            model, torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + index))
        ).backward()
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    with PlannedStep(model, squared, optimizer, plan, device="cpu") as step:
        for index in range(10):
            step(torch.randn(8, 6, generator=torch.Generator().manual_seed(index)))
        notes = step.notes
    return before, [p.detach() for p in model.parameters()], notes


def apart(before: list[Tensor], plain: list[Tensor], other: list[Tensor]) -> float:
    """How far two sets of parameters are from each other, beside how far training has come."""
    update = torch.cat([(a - b).flatten() for a, b in zip(plain, before, strict=True)]).norm()
    between = torch.cat([(a - b).flatten() for a, b in zip(other, plain, strict=True)]).norm()
    return float(between / update)


WHOLE = ("compiled", "step-graph", "packaged")
REPLAYED = ("graph", "compiled+graph", "model-graph", "compiled+model-graph")


@pytest.mark.filterwarnings(
    "ignore:Your compiler for AOTAutograd:UserWarning"
)  # the interpreter's functions
@pytest.mark.parametrize("begun", [0, 4])
@pytest.mark.parametrize("execution", [*WHOLE, *REPLAYED])
def test_radam_is_radam_in_every_mode(execution: Execution, begun: int) -> None:
    """Over the steps in which its form for captures is another one, from the first step or from within them."""
    before, plain, _ = trained("RAdam", Plan(), begun)
    with emulated_graphs() if execution in REPLAYED else nullcontext(), interpreted():
        _, other, _ = trained("RAdam", Plan(execution=execution), begun)
    assert apart(before, plain, other) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_ten_replayed_steps_are_those_of_the_loop(name: str) -> None:
    """RAdam's form for captures is 0.6 % of the update away, so it steps outside; a note says why."""
    before, plain, _ = trained(name, Plan())
    with emulated_graphs(), interpreted():
        _, replayed, notes = trained(name, Plan(execution="graph"))
    assert apart(before, plain, replayed) <= 1e-4
    outside = [note for note in notes if "steps outside of the graph" in note]
    wanted = [
        f"the optimizer {name} steps outside of the graph: {why}"
        for n, why in INEXACT.items()
        if n == name
    ]
    assert outside == wanted
