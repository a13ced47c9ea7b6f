"""A graph that is written by hand clears away what its failed capture leaves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.experiments.contests import WARMUP_CALLS
from ridgeline.experiments.networks.sides import by_hand
from ridgeline.experiments.networks.sides.by_hand import whole_step_graph
from ridgeline.experiments.plain_step import PlainStep


def test_a_capture_that_fails_is_cleared_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and its own error is raised; the steps that warm up are none."""
    cleared, calls = list[Any](), list[int]()
    monkeypatch.setattr(by_hand, "clear_failed_capture", lambda *what: cleared.append(what))
    model = nn.Linear(2, 2)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > WARMUP_CALLS:
            raise RuntimeError("no capture holds this")
        return model(batch).square().mean()

    step = PlainStep(model, model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    with emulated_graphs(), pytest.raises(RuntimeError, match="no capture holds this"):
        whole_step_graph(step, torch.ones(3, 2))
    assert len(cleared) == 1
    assert len(calls) == WARMUP_CALLS + 1
