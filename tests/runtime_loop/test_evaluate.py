"""Evaluating leaves model and generators as training left them."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import loop_tasks
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ridgeline.plan import Plan
from ridgeline.runtime.training.evaluate import evaluate
from ridgeline.runtime.training.loop import train
from ridgeline.workers.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))
DATA = TensorDataset(torch.ones(10, 6))


def frozen_norm() -> nn.Module:
    """A network whose batch norm does not learn statistics."""
    model = loop_tasks.Net()
    model.layers[1].eval()
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_every_module_keeps_its_mode() -> None:
    """All are in eval mode for the metric, and each in its own afterwards, also where the metric fails."""
    model = frozen_norm()
    before, seen = modes(model), []

    def metric(model: nn.Module, batch: Any) -> Tensor:
        seen.extend(modes(model))
        return torch.zeros(()) if len(seen) == len(before) else torch.zeros(2)

    evaluate(model, metric, DATA, batch_size=10, world=ALONE)
    assert modes(model) == before
    with pytest.raises(RuntimeError, match="shape"):
        evaluate(model, metric, DATA, batch_size=10, world=ALONE)
    assert modes(model) == before
    assert len(seen) == 2 * len(before)
    assert not any(seen)
    assert len({*before}) == 2


def test_what_a_metric_draws_is_no_part_of_training() -> None:
    """Generators of torch and Python continue as if nothing had been evaluated."""

    def metric(model: nn.Module, batch: Any) -> Tensor:
        return torch.rand(()) + random.random()

    model = loop_tasks.Net()
    torch.manual_seed(1)
    random.seed(1)
    wanted = torch.rand(3).tolist(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    evaluate(model, metric, DATA, batch_size=5, world=ALONE)
    assert (torch.rand(3).tolist(), random.random()) == wanted


def test_a_frozen_norm_resumes_bitwise(tmp_path: Path) -> None:
    """A run that is resumed after an epoch has the losses of one that was not stopped."""
    task = dataclasses.replace(loop_tasks.task(), model=frozen_norm, scheduler=None)
    whole = train(task, Plan(), ALONE, run_dir=tmp_path / "whole", epochs=3).history
    train(task, Plan(), ALONE, run_dir=tmp_path / "parts", epochs=1)
    parts = train(task, Plan(), ALONE, run_dir=tmp_path / "parts", epochs=3, resume=True).history
    assert [point.loss for point in parts.steps] == [point.loss for point in whole.steps]
