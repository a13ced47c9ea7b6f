"""Random numbers on the host that decide nothing keep no step out of a graph, and those that do still do.

torch's `meta` device stands for the device that is captured.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.capture.dropout_states import DropoutStates
from ridgeline.guards.reading import UnreadableError
from ridgeline.lint.idle_draws import _COMPARISONS, IdleDraw
from ridgeline.lint.lint import inspect_step
from ridgeline.plan import Plan
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs.captured_step import CapturedStep
from ridgeline.runtime.steps.whole_step.reads import StepReads

sys.path.append(str(Path(__file__).parents[1]))

import strategies  # noqa: F401 - loads the profile of hypothesis


class Layers(nn.Module):
    """Layers that are left out by chance, as those of transformers are."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layerdrop = layerdrop

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            skips = False
            if self.training:
                skips = torch.rand([]) < self.layerdrop
            if not skips:
                x = layer(x).relu()
        return x


class Noisy(Layers):
    """One that uses what it draws, too."""

    def forward(self, x: Tensor) -> Tensor:
        draw = torch.rand(())
        return super().forward(x) * (draw if draw < 1.0 else 0.0)


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def body_of(model: nn.Module, device: str = "meta") -> StepBody:
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    place = torch.device(device)
    return StepBody(model, mean, optimizer, Plan(), None, clip_norm=None, device=place)


def test_draws_that_decide_nothing_are_no_obstacle() -> None:
    """A layerdrop of zero leaves out nothing; what was drawn is to be drawn beside each replay."""
    body = body_of(Layers(0.0))
    before = torch.get_rng_state()
    lint = inspect_step(body, torch.empty(2, 4, device="meta"), device="meta")
    assert lint.findings == ()
    assert lint.idle_draws == (IdleDraw((), torch.float32),) * 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("model", [lambda: Layers(0.5), lambda: Noisy(0.0)])
def test_draws_that_decide_something_are(model: Callable[[], nn.Module]) -> None:
    """Whether a layer is left out, or what it computes."""
    torch.manual_seed(2)
    lint = inspect_step(body_of(model()), torch.empty(2, 4, device="meta"), device="meta")
    found = {one.rule: one for one in lint.findings}
    assert "aten.rand" in str(found["host-randomness"])
    assert "test_idle_draws.py" in found["host-randomness"].line


@given(st.sampled_from(sorted(_COMPARISONS)), st.floats(-1.5, 1.5), st.floats(0.0, 1.0))
def test_a_limit_decides_for_every_draw_or_is_not_taken(
    name: str, limit: float, draw: float
) -> None:
    """Where a limit is said to decide, all draws of [0, 1) compare alike."""
    compare = getattr(torch, name.removeprefix("aten."))
    draws = torch.tensor([0.0, min(draw, 1.0 - 2.0**-24), 1.0 - 2.0**-24])
    outcomes = compare(draws, limit)
    if _COMPARISONS[name](limit):
        assert bool(outcomes.all()) or not bool(outcomes.any())


def test_what_the_reading_assumes_is_guarded() -> None:
    """Another layerdrop is noticed; without the assurance nobody reads a branch on a draw."""
    body = body_of(Layers(0.0), "cpu")
    batch = torch.randn(2, 4)
    reads = StepReads(body, batch, "cpu", is_lifted=False, has_idle_draws=True)
    assert reads.broken() is None
    assert reads.serves(batch)
    body.model.layerdrop = 0.5
    assert "layerdrop" in str(reads.broken())
    with pytest.raises(UnreadableError, match="a branch on the value of a tensor"):
        StepReads(body, batch, "cpu", is_lifted=False)


def test_a_replay_draws_what_the_step_draws() -> None:
    """The host's generator goes on as in the step as written."""

    class Graph:
        def replay(self) -> None: ...

    step: Any = CapturedStep.__new__(CapturedStep)
    step.dropout = DropoutStates(())
    step.graph, step._outside, step._loss, step._renewals = Graph(), None, 1, []
    step.gradients = SimpleNamespace(added_to=[], are_shown=lambda: True)
    step._idle_draws = (IdleDraw((), torch.float32), IdleDraw((1,), torch.float64))
    torch.manual_seed(3)
    torch.rand([])
    torch.rand(1, dtype=torch.float64)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    step.replay()
    assert torch.equal(torch.rand(4), wanted)
