"""Compilers that draw random numbers for themselves: steps go on to draw what plain PyTorch draws."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ridgeline.capture.flat_program import flatten_program
from ridgeline.packages import aot, package
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step import runner

STEPS = 4


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def draw() -> None:
    """What somebody draws from every generator that a step may use."""
    torch.rand(8)
    np.random.rand(8)
    random.random()


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def drawing(plain: Any) -> Any:
    def call(*args: Any, **settings: Any) -> Any:
        draw()
        return plain(*args, **settings)

    return call


def losses(execution: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, loss_fn, optimizer, Plan(execution=execution)) as step:
        return [float(step(torch.ones(4, 8) * index)) for index in range(STEPS)]


def test_a_package_is_made_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch draws meanwhile, all generators are as before."""
    monkeypatch.setattr(aot, "aoti_compile_and_package", drawing(aot.aoti_compile_and_package))
    monkeypatch.setattr(package, "aoti_load_package", drawing(package.aoti_load_package))
    x = torch.ones(3)
    program = flatten_program(lambda x: x + 1.0, x)
    before = states()
    path = aot.compile_program(program.graph, program.inputs, tmp_path)
    assert states() == before
    run = package.load_compiled(path, torch.device("cpu"))
    assert states() == before
    assert run([x])[0].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("draws", ["compile_graph", "bind"])
def test_steps_draw_as_written(draws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first compiled step, too, drops out what the eager one would."""
    monkeypatch.setattr(runner, draws, drawing(getattr(runner, draws)))
    assert losses("step-graph") == pytest.approx(losses("eager"), rel=1e-5)
