"""A loss that takes entries out of its batch: the choice of a plan works on containers of its own."""

from typing import Any

import torch
from torch import Tensor, nn

import ridgeline as rl
from adversary.interpreting import interpreted


def consuming(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch.pop("wanted")).square().mean()


def batch_of(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    return {
        "x": torch.randn(3, 4, generator=generator),
        "wanted": torch.randn(3, 2, generator=generator),
    }


def test_auto_trains_as_a_loop_does_and_takes_out_once() -> None:
    """Trials repeat one batch, which had no entry left for the second step."""
    ends = []
    for plan in (rl.Plan(), "auto"):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with (
            interpreted(),
            rl.TrainStep(
                model,
                consuming,
                optimizer,
                plan,
                device="cpu",
                seconds=None if plan != "auto" else 2.0,
            ) as step,
        ):
            for index in range(3):
                batch = batch_of(index)
                loss = step(batch)
                assert [*batch] == ["x"]
        ends.append([loss, *model.parameters()])
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs)
