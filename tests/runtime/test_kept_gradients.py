"""A gradient that a user keeps stays as a plain step leaves it; graphs are emulated on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError
from ridgeline.model_graphs.form import GRADIENTS_KEPT
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.graphs.graph_gradients import COPIED, GraphGradients, leave_kept
from ridgeline.runtime.steps.step import PlannedStep

NUM_STEPS = EAGER_STEPS + 5
Keep = Callable[[nn.Sequential, int], list[Tensor | None]]


def gradients(model: nn.Sequential, number: int) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def one(model: nn.Sequential, number: int) -> list[Tensor | None]:
    return [model[0].weight.grad] if number == EAGER_STEPS + 1 else []


def views(model: nn.Sequential, number: int) -> list[Tensor | None]:
    return [parameter.grad.view(-1)[:2] for parameter in model.parameters()]


def cleared(model: nn.Sequential, number: int) -> list[Tensor | None]:
    found = gradients(model, number)
    model.zero_grad()
    return found


def replaced(model: nn.Sequential, number: int) -> list[Tensor | None]:
    found = gradients(model, number)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return found


def added_to(model: nn.Sequential, number: int) -> list[Tensor | None]:
    return [model[1].weight.grad]


def added_to_and_cleared(model: nn.Sequential, number: int) -> list[Tensor | None]:
    found = model[1].weight.grad
    if number % 2:
        model[1].weight.grad = None
    return [found]


def sums(model: nn.Sequential, number: int) -> list[Tensor | None]:
    return [parameter.grad.sum() for parameter in model.parameters()]


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def train(execution: Execution, keep: Keep) -> tuple[list[Any], list[Tensor], PlannedStep]:
    """What was kept, as it is in the end, the parameters, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    others = [p for p in model.parameters() if p is not model[1].weight]
    held = others if keep in (added_to, added_to_and_cleared) else [*model.parameters()]
    optimizer, kept = torch.optim.SGD(held, 0.1, momentum=0.9), list[Any]()
    plan = Plan(execution=execution)
    with emulated_graphs(), PlannedStep(model, squared, optimizer, plan, device="cpu") as step:
        for number in range(NUM_STEPS):
            step(torch.full((3, 4), 0.1 * (number + 1)))
            kept += keep(model, number)
    return kept, [*model.parameters()], step


@pytest.mark.parametrize("execution", ["graph", "model-graph"])
@pytest.mark.parametrize(
    "keep", [gradients, one, views, cleared, replaced, added_to, added_to_and_cleared, sums]
)
def test_kept_gradients_are_those_of_eager_steps(execution: Execution, keep: Keep) -> None:
    """Also once parameters have others, or are added to in place as nobody clears them."""
    wanted, got = train("eager", keep), train(execution, keep)
    torch.testing.assert_close(got[:2], wanted[:2], rtol=1e-5, atol=1e-6)
    # What is added to in place is in the end one tensor, in both.
    assert len({*map(id, got[0])}) == len({*map(id, wanted[0])})


@pytest.mark.parametrize("execution", ["graph", "model-graph"])
def test_gradients_that_nobody_keeps_are_no_copies(execution: Execution) -> None:
    """Those that a step writes, step after step; a view costs a capture, a kept one none."""
    notes = train(execution, sums)[2].notes
    assert not {COPIED, GRADIENTS_KEPT} & {*notes}
    for keep, num_recaptures in ((gradients, 0.0), (views, 1.0)):
        step = train(execution, keep)[2]
        assert {COPIED, GRADIENTS_KEPT} & {*step.notes}
        if execution == "graph":
            assert step.timeline().counters.get("recaptures", 0.0) == num_recaptures


def test_a_kept_view_is_refused_among_several_workers() -> None:
    """The others would not capture again; an object is left to who keeps it."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    held = GraphGradients(layer.parameters(), optimizer, copies=False)
    layer(torch.ones(1, 2)).sum().backward()
    held.take()
    held.watch()
    assert leave_kept([held], 2) is None
    view = layer.weight.grad.view(-1)
    with pytest.raises(
        CaptureError, match="nobody keeps a view of a gradient, got one in the memory"
    ):
        leave_kept([held], 2)
    assert view.numel() == 4
