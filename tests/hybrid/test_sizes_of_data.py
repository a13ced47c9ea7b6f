"""Steps whose tensors are as long as the data says train as one program."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")


def selected(found: Tensor, mask: Tensor) -> Tensor:
    return found[mask]


def placed(found: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero().squeeze(1)
    return found.index_select(0, rows) * rows[:, None]


def written(found: Tensor, mask: Tensor) -> Tensor:
    into = torch.zeros_like(found)
    into[mask] = found[mask].softmax(0)
    return into


def masked(found: Tensor, mask: Tensor) -> Tensor:
    return found.masked_select(mask[:, None])


FORMS = {form.__name__: form for form in (selected, placed, written, masked)}


def trained(form: Callable[..., Tensor], plan: Plan) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return form(model(batch[0]), batch[1]).square().sum()

    losses = []
    with PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        for index in range(6):
            draws = torch.Generator().manual_seed(index)
            x = torch.randn(8, 4, generator=draws)
            mask = torch.arange(8) < index  # none of them first
            losses.append(float(step((x, mask))))
    return losses, model.state_dict()


def test_the_compiler_takes_open_sizes() -> None:
    """The one that makes code."""
    wanted, _ = trained(selected, Plan())
    losses, _ = trained(selected, Plan(execution="step-graph"))
    assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", FORMS)
def test_one_program_follows_the_number_of_rows(name: str) -> None:
    """It is made where few are selected, and then gets none, one and more."""
    wanted, wanted_state = trained(FORMS[name], Plan())
    losses, state = trained(FORMS[name], Plan(execution="step-graph"))
    assert losses == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(state, wanted_state, rtol=1e-4, atol=1e-6)
