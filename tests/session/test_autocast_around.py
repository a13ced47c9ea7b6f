"""Steps that are called inside of autocast, which keeps casts of weights until its end."""

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
