"""Schedulers that change more than the learning rate in each step, as `OneCycleLR` does by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from emulated_graphs import emulated_graphs
from ridgeline.errors import PlanError
from ridgeline.optimizer_forms import fits_graph
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

Schedule = Callable[[Any], LRScheduler]


def one_cycle(optimizer: Any) -> LRScheduler:
    return OneCycleLR(optimizer, 0.05, total_steps=20)


def cyclic(optimizer: Any) -> LRScheduler:
    return CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)


def steady(optimizer: Any) -> LRScheduler:
    return OneCycleLR(optimizer, 0.05, total_steps=20, cycle_momentum=False)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - 1.0).square().mean()


def made(name: str, schedule: Schedule) -> tuple[nn.Module, Any, LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **momentum)
    return model, optimizer, schedule(optimizer)


def trained(
    name: str, schedule: Schedule, execution: Execution
) -> tuple[nn.Module, list[str], Any]:
    model, optimizer, scheduler = made(name, schedule)
    with PlannedStep(model, squared, optimizer, Plan(execution=execution), device="cpu") as step:
        for index in range(10):
            step(torch.randn(8, 6, generator=torch.Generator().manual_seed(index)))
            scheduler.step()
        return model, step.notes, step.timeline().counters


@pytest.mark.parametrize(
    ("name", "schedule", "setting"),
    [("AdamW", one_cycle, "betas"), ("SGD", one_cycle, "momentum"), ("SGD", cyclic, "momentum")],
)
def test_the_optimizer_steps_behind_replays(name: str, schedule: Schedule, setting: str) -> None:
    """A graph with its step inside would be captured again for every step."""
    plain, _, _ = trained(name, schedule, "eager")
    with emulated_graphs():
        replayed, notes, counters = trained(name, schedule, "graph")
    for ours, wanted in zip(replayed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted)
    assert counters.get("recaptures", 0) == 0
    assert (
        f"the optimizer {name} steps outside of the graph: a scheduler changes its {setting} between steps, "
        "and replays would repeat one value"
    ) in notes


@pytest.mark.parametrize("execution", ["step-graph", "packaged"])
def test_one_program_is_refused(execution: Execution) -> None:
    """It would be compiled again for every step."""
    model, optimizer, _ = made("AdamW", one_cycle)
    with pytest.raises(PlanError) as caught:
        PlannedStep(model, squared, optimizer, Plan(execution=execution), device="cpu")
    assert str(caught.value) == (
        f"wanted settings that stay for execution={execution!r}, whose one program has them as constants, "
        "got AdamW whose betas a scheduler changes between 0.85 and 0.95 in group 0; give the scheduler "
        "cycle_momentum=False, or use execution='compiled'"
    )


def test_a_schedule_of_the_rate_alone_changes_nothing() -> None:
    """Rates lie in tensors, which graphs read."""
    model, optimizer, _ = made("AdamW", steady)
    assert fits_graph(optimizer, model)
    PlannedStep(model, squared, optimizer, Plan(execution="step-graph"), device="cpu").close()
