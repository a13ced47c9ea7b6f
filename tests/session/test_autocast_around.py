"""Steps inside of autocast, the user's or the plan's, which keeps casts of weights until its end."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from adversary.interpreting import interpreted
from repeated_blocks import TanhBlock
from ridgeline.plan import Plan


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def by_hand(rows: list[Tensor]) -> list[Any]:
    model, optimizer = made()
    losses = []
    for batch in rows:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = squares(model, batch)
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), TanhBlock(), TanhBlock(), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize(
    "plan", ["auto", Plan(), Plan(execution="regional")], ids=["auto", "eager", "regional"]
)
def test_steps_are_those_of_a_loop(plan: Any) -> None:
    """The trace was refused for casts without data, and a check left those of its perturbed weights."""
    rows = [*torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))]
    wanted = by_hand(rows)
    model, optimizer = made()
    seconds = 2.0 if plan == "auto" else None
    losses = []
    with (
        interpreted(),
        rl.TrainStep(model, squares, optimizer, plan, device="cpu", seconds=seconds) as step,
    ):
        for batch in rows:
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(step(batch))
    for mine, theirs in zip([*losses, *model.parameters()], wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


class Repeated(nn.Module):
    """Uses one weight three times, as a cell of a loop over time does."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, batch: Tensor) -> Tensor:
        for _ in range(3):
            batch = torch.tanh(self.cell(batch))
        return batch


@pytest.mark.parametrize("is_inside", [False, True], ids=["alone", "inside of autocast"])
def test_weights_are_cast_once_a_step(is_inside: bool) -> None:
    """Cast at each use, their gradients added up in another precision, and took a fifth longer on a GPU."""
    rows = [*torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))]
    torch.manual_seed(0)
    models = Repeated(), Repeated()
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for batch in rows:
        optimizers[0].zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = squares(models[0], batch)
        loss.backward()
        optimizers[0].step()
    plan = Plan(precision="bf16")
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=is_inside),
        rl.TrainStep(models[1], squares, optimizers[1], plan, device="cpu") as step,
    ):
        # Casts of an outer region would be of the weights that its first step had.
        losses = [step(batch) for batch in rows]
    assert torch.equal(losses[-1], loss)
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
