"""A step that cannot be captured or compiled leaves what was there; graphs are emulated on the CPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError, EquivalenceError
from ridgeline.plan import Plan
from ridgeline.runtime.graph import EAGER_STEPS
from ridgeline.runtime.step import TrainStep


@pytest.fixture(autouse=True)
def graphs() -> Iterator[None]:
    with emulated_graphs():
        yield


class Showing(nn.Module):
    """Keeps what it computed, as an attribute (a normalised weight, say) and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.scaled = self.hidden.weight * 2.0
        self.shown: list[Any] = [None]

    def forward(self, x: Tensor) -> Tensor:
        self.scaled = self.hidden.weight * 2.0
        self.shown[0] = y = nn.functional.linear(x, self.scaled).relu()
        return self.out(y)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("fails", ["capture", "check"])
def test_a_capture_that_fails_leaves_what_was_there(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under each name the tensor of the last step: one of a capture was never computed."""

    @contextlib.contextmanager
    def failing(*args: Any, **kwargs: Any) -> Iterator[None]:
        with captured(*args, **kwargs):
            yield
        raise RuntimeError("operation failed due to a previous error during capture")

    def differing(*_: Any, **__: Any) -> None:
        raise EquivalenceError("it differs")

    torch.manual_seed(0)
    model, captured = Showing(), torch.cuda.graph
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with TrainStep(model, loss_of, optimizer, Plan(execution="graph"), device="cpu") as step:
        for _ in range(EAGER_STEPS):
            step(torch.randn(4, 6))
        if fails == "capture":
            monkeypatch.setattr(torch.cuda, "graph", failing)
        else:
            monkeypatch.setattr("ridgeline.runtime.graph.check_replay", differing)
        x = torch.randn(4, 6)
        before = model.scaled, model.shown[0], torch.get_rng_state()
        values = [tensor.detach().clone() for tensor in before]
        with pytest.raises((CaptureError, EquivalenceError)):
            step(x)
    assert model.scaled is before[0]
    assert model.shown[0] is before[1]
    now = [model.scaled, model.shown[0], torch.get_rng_state()]
    assert all(map(torch.equal, now, values))
