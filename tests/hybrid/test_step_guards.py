"""What a step as one program has to notice between steps: after any change it trains like the eager step."""

from typing import Any

import pytest
import torch
from step_pairs import adamw, pair_of
from torch import nn

from ridgeline.runtime.step import TrainStep

pytestmark = pytest.mark.usefixtures("interpreted")


def first(step: TrainStep) -> Any:
    """The first layer."""
    return step.model.get_submodule("0")


def group(step: TrainStep) -> dict[str, Any]:
    return step.optimizer.param_groups[0]


def frozen_first() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(requires_grad=False)
    return model


def test_gradual_unfreezing_goes_on() -> None:
    """A layer released later has no optimizer state yet; an eager step makes it, then compiling goes on."""
    with pair_of(frozen_first, adamw) as pair:
        pair.train(8, {3: lambda step: first(step).requires_grad_(requires_grad=True)})
        assert pair.counters()["recaptures"] == 1
        assert pair.program._runner._prepared


def test_momentum_switched_on_later_goes_on() -> None:
    """Its buffers do not exist before; the step after the change makes them."""

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.1)

    with pair_of(optimizer=plain) as pair:
        pair.train(8, {3: lambda step: group(step).update(momentum=0.9)})
        assert pair.program._runner._prepared
