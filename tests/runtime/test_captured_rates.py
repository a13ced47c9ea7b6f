"""Learning rates that the script has given as tensors, beside a graph that reads them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

Change = Callable[[int, torch.optim.Optimizer, Tensor], object]


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulated_graphs():
        yield


def trained(execution: Any, change: Change) -> tuple[list[Tensor], float, float]:
    """Parameters at the end, how often it was captured again, and the tensor that the script had given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    rate = torch.tensor(0.1)
    groups = [{"params": part.parameters()} for part in (model[0], model[2])]
    optimizer = torch.optim.SGD(groups, lr=rate)
    with PlannedStep(
        model,
        lambda model, batch: model(batch).square().mean(),
        optimizer,
        Plan(execution=execution),
        device="cpu",
    ) as step:
        for index in range(11):
            change(index, optimizer, rate)
            step(torch.randn(6, 4))
        recaptures = step.timeline().counters.get("recaptures", 0.0)
    return [p.detach() for p in model.parameters()], recaptures, float(rate)


def a_number_for_one(index: int, optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    if index == 7:
        optimizer.param_groups[0]["lr"] = 0.5


def numbers_of_it(index: int, optimizer: torch.optim.Optimizer, rate: Tensor) -> None:
    if index >= 6:
        for group in optimizer.param_groups:
            group["lr"] = rate * 0.9**index


def other_order(index: int, optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    if index == 0:
        optimizer.param_groups[0]["lr"] = 0.3
    if index in (1, 7):
        optimizer.param_groups.reverse()


def written(index: int, _: torch.optim.Optimizer, rate: Tensor) -> None:
    rate.fill_(0.1 / (1 + index))


@pytest.mark.parametrize(
    ("change", "recaptures"),
    [(a_number_for_one, 1.0), (numbers_of_it, 1.0), (other_order, 1.0), (written, 0.0)],
)
def test_a_tensor_that_was_given_stays_the_scripts(
    change: Change, recaptures: float, emulated: None
) -> None:
    """It is followed where it is written, and never written for a group that has another rate by now."""
    wanted, _, last = trained("eager", change)
    got, count, rate = trained("graph", change)
    torch.testing.assert_close(got, wanted)
    assert (count, rate) == (recaptures, last)
