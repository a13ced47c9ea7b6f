"""A child gets modules whose weights are computed, and trains them as this process does."""

import copy
import importlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from child_programs import losses
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ridgeline.lint import step_pickle
from ridgeline.lint.child_trial import try_in_child


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def twice(module: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "bias", Doubled())
    return parametrizations.weight_norm(module)


WAYS: list[Callable[..., nn.Module]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    twice,
]


@pytest.mark.parametrize("way", WAYS)
def test_what_was_written_trains_as_the_original(way: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(way(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    file = io.BytesIO()
    torch.save({"model": model, "again": model[0]}, file, pickle_module=step_pickle)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert read["again"] is read["model"][0]
    assert isinstance(read["again"], nn.Linear)
    assert [*read["model"].state_dict()] == [*model.state_dict()]
    assert losses(read["model"]) == losses(model)


def test_a_child_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And tells of a loss that is another."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    programs = importlib.import_module("child_programs")
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)))
    wanted = losses(copy.deepcopy(model))
    for by, told in ((0.0, ("ok", "")), (1.0, ("failed", "ValueError: other losses"))):
        payload = {"model": model, "wanted": [loss + by for loss in wanted]}
        assert try_in_child(programs.require_losses, payload)[:2] == told
