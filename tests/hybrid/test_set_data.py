"""`.data =` gives a tensor other memory, which the trace of a step passes over: refused, idle or not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.whole_step.program import trace_step
from ridgeline.session import TrainStep


class Normed(nn.Linear):
    """A layer that makes its weight anew before each use."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        return super().forward(x)


class Averaged(nn.Linear):
    """A layer with a target that follows it."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("target", torch.zeros_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        self.target.data = 0.9 * self.target + 0.1 * self.weight.detach()
        return super().forward(x) - nn.functional.linear(x, self.target)


class Descent(torch.optim.SGD):
    """An update as many write it by hand."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def clipped(model: nn.Module, batch: Tensor) -> Tensor:
    """Of weights that are within the limits until later."""
    for p in model.parameters():
        p.data = p.data.clamp(-9.0, 9.0)
    return mean(model, batch)


@pytest.mark.parametrize(
    ("model", "loss_fn", "optimizer", "place"),
    [
        (Normed, mean, torch.optim.SGD, "forward"),
        (Averaged, mean, torch.optim.SGD, "forward"),
        (nn.Linear, mean, Descent, "step"),
        (nn.Linear, clipped, torch.optim.SGD, "clipped"),
    ],
)
def test_it_is_refused_with_its_line(
    model: Callable[..., nn.Module], loss_fn: Any, optimizer: Any, place: str
) -> None:
    network = model(3, 3)
    before = [p.clone() for p in network.parameters()]
    message = (
        rf"`\.data = \.\.\.` at test_set_data.py:\d+ in {place}, .* or use execution='compiled'"
    )
    with pytest.raises(CaptureError, match=message):
        trace_step(network, loss_fn, optimizer(network.parameters(), lr=0.1), torch.ones(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), before, strict=True))


def test_weights_that_are_clipped_later_are_refused_before() -> None:
    """The program had no clipping in it, and the steps that were compared did none."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, clipped, optimizer, plan=Plan(execution="step-graph"))
    step(torch.ones(2, 3))
    with pytest.raises(CaptureError, match=r"`\.data = "):
        step(torch.ones(2, 3))
