"""A step as one program, and buffers that somebody replaces and has under another name as well."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep


class Scaled(nn.Module):
    """A layer, and a buffer that scales what it gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale.sum()


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda kept: kept,
    "detached": Tensor.detach,
    "a view": lambda kept: kept.view(2),
    "a copy": Tensor.clone,
}
"""What the model gets of a tensor that somebody keeps, and writes into later."""


def losses(show: Callable[[Tensor], Tensor], *, is_plain: bool) -> tuple[list[float], list[str]]:
    """Of eight steps, and the step's notes; the buffer is replaced before the fifth."""
    model, x = Scaled(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(execution="eager" if is_plain else "step-graph")
    found = []
    with PlannedStep(model, mean_square, optimizer, plan, device="cpu") as step:
        for index in range(8):
            if index == 4:
                kept = torch.full((2,), 2.0)
                model.scale = show(kept)
            if index > 4:
                kept.mul_(0.5)
            found.append(float(step(x)))
        return found, step.notes


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_written_into_a_buffer_by_another_name_is_seen(
    interpreted: None, name: str
) -> None:
    """A program with the buffer's values of before would train with those."""
    wanted, _ = losses(SHOWN[name], is_plain=True)
    got, notes = losses(SHOWN[name], is_plain=False)
    assert got == pytest.approx(wanted, rel=1e-5)
    compiled_again = any("compiled again" in note for note in notes)
    assert compiled_again is (name != "a copy")
