"""Programs in `benchmarks/`, in small: what they build can be trained, and what they find can be written."""

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ridgeline.experiments.plain_step import PlainStep
from ridgeline.workers.world import World
from strategies import make_machine

ROOT = Path(__file__).parents[2]
CPU = World(0, 1, 0, torch.device("cpu"))


def program(name: str) -> ModuleType:
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["resnet18", "gpt2"])
def test_networks_of_weak_scaling_train(name: str) -> None:
    """The networks that only that benchmark has are built as those of the catalog: a step has a finite loss."""
    setup = program("weak_scaling").OWN[name].build("cpu", "cpu")
    step = PlainStep(setup.model, setup.model, setup.loss_fn, setup.optimizer)
    assert step(setup.batch).isfinite()


def test_data_parallel_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file says with which arguments, that of the file among them."""
    module = program("data_parallel")
    monkeypatch.setattr(module, "measure", make_machine)
    arguments = argparse.Namespace(workers=1, output=tmp_path / "found.json")
    samples = {"plain": [2.0, 2.0], "ridgeline eager": [1.0, 1.0]}
    module.publish(arguments, CPU, {}, samples, {"ridgeline eager": 0.5}, "plain")
    found = json.loads(arguments.output.read_text())
    assert found["arguments"] == {"workers": 1, "output": str(arguments.output)}
    assert found["times_faster_than_plain"]["ridgeline eager"]["median_s"] == 2.0
    assert f"written to {arguments.output}" in capsys.readouterr().out
