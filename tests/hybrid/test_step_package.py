"""A whole training step in a file: another process goes on training, without the model's source."""

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

from ridgeline.errors import BatchError, PackageError, PlanError
from ridgeline.packages.package import read_package
from ridgeline.plan import Plan
from ridgeline.runtime.steps.load import load
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.lifting import state_on
from ridgeline.runtime.steps.whole_step.saved.loaded import LoadedStep
from ridgeline.runtime.steps.whole_step.saved.saving import load_step
from warm import WARM

STEPS_BEFORE, STEPS_AFTER = 4, 5

CONTINUES = """
import json, sys, torch
from ridgeline.runtime.steps.load import load

step = load(sys.argv[1])
losses = []
for index in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(8, 16, generator=generator)
    y = torch.randint(0, 4, (8,), generator=generator)
    losses.append(float(step({"x": x, "y": y, "scale": 0.5})))
print(json.dumps(losses))
"""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.25)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        return self.last(self.drop(torch.relu(self.second(hidden))))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) * batch["scale"]


def batch_of(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(8, 16, generator=generator)
    return {"x": x, "y": torch.randint(0, 4, (8,), generator=generator), "scale": 0.5}


class Trained(NamedTuple):
    """A step saved after some steps, and what the uninterrupted and the eager run did afterwards."""

    path: Path
    losses: list[float]
    eager_losses: list[float]
    final: dict[str, Tensor]


def train(execution: Any, path: Path | None) -> tuple[list[float], nn.Module]:
    """Losses after the save; batch and dropout are those of the uninterrupted run."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    plan = Plan(execution=execution)
    with PlannedStep(model, loss_fn, optimizer, plan, clip_norm=1.0, device="cpu") as step:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for index in range(STEPS_BEFORE):
            step(batch_of(index))
            scheduler.step()
        if path is not None:
            step._runner.save(path)  # type: ignore[attr-defined]
        after = range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
        return [float(step(batch_of(index))) for index in after], model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("package") / "step.pt2"
    with config.patch(compile_threads=1):
        losses, model = train("packaged", path)
    eager_losses, _ = train("eager", None)
    final = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return Trained(path, losses, eager_losses, final)


def loaded(trained: Trained) -> LoadedStep:
    return load_step(read_package(trained.path))


def test_a_packaged_step_trains_like_the_eager_one(trained: Trained) -> None:
    """Same losses, within rounding, with dropout, batch norm, clipping and a scheduler."""
    assert trained.losses == pytest.approx(trained.eager_losses, abs=1e-6)


def test_another_process_goes_on_with_the_same_losses(trained: Trained, tmp_path: Path) -> None:
    """A process that knows nothing of the model continues bit by bit where the step was saved."""
    script = tmp_path / "continues.py"
    script.write_text(CONTINUES)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = WARM.command(script, trained.path, STEPS_BEFORE, STEPS_AFTER, environment=environment)
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == trained.losses


def test_what_was_trained_can_be_read(trained: Trained) -> None:
    """Parameters and buffers by their names, tied ones under both; they load into the model."""
    step = loaded(trained)
    for index in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        step.step(batch_of(index))
    assert step.state_dict().keys() == trained.final.keys()
    for name, tensor in step.state_dict().items():
        assert torch.equal(tensor, trained.final[name]), name
    assert step.parameters()["second.weight"] is step.parameters()["first.weight"]
    assert "norm.running_mean" in step.buffers()
    assert float(step.state()["last.bias/step"]) == STEPS_BEFORE + STEPS_AFTER
    Tied().load_state_dict(step.state_dict())
    assert repr(step) == f"LoadedStep({trained.path}, 372 parameters, cpu)"


def test_learning_rates_can_be_read_and_set(trained: Trained) -> None:
    """It is where the scheduler left it; 0 stops training, but for the running statistics."""
    step = loaded(trained)
    assert step.lr == pytest.approx((0.01 * 0.9**STEPS_BEFORE,))
    step.lr = 0.0
    before = {name: p.clone() for name, p in step.parameters().items()}
    step(batch_of(0))
    assert all(torch.equal(p, before[name]) for name, p in step.parameters().items())
    with pytest.raises(
        PackageError, match="wanted a learning rate for each of 1 parameter groups, got 2"
    ):
        step.lr = (0.1, 0.2)
    for rate in (math.nan, math.inf, -0.1):
        with pytest.raises(PackageError, match=f"wanted finite learning rates >= 0, got {rate}"):
            step.lr = rate
    assert step.lr == (0.0,)


def test_a_loaded_step_is_saved_again(trained: Trained, tmp_path: Path) -> None:
    """Nothing is compiled, and the copy goes on like the one that was saved."""
    step = loaded(trained)
    step(batch_of(STEPS_BEFORE))
    again = load(step.save(tmp_path / "again.pt2"))
    assert isinstance(again, LoadedStep)
    losses = [float(again(batch_of(index))) for index in range(STEPS_BEFORE + 1, STEPS_BEFORE + 5)]
    assert losses == trained.losses[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(8, 16).double()}, "wanted leaf ['x'] of the batch as (8, 16) float32, got (8, 16) float64"),
        ({"y": torch.ones(7).long()}, "wanted leaf ['y'] of the batch as (8,) int64, got (7,) int64"),
        ({"scale": 1.0}, "wanted leaf ['scale'] of the batch as 0.5, got 1.0"),
        ({"more": torch.ones(1)}, "wanted leaf ['more'] of the batch as no such leaf, got (1,) float32"),
    ],
)  # fmt: skip
def test_another_batch_is_refused(trained: Trained, change: Any, message: str) -> None:
    """The message names the leaf and what to do; nothing was trained."""
    step = loaded(trained)
    before = {name: tensor.clone() for name, tensor in step.state().items()}
    with pytest.raises(BatchError) as caught:
        step({**batch_of(0), **change})
    assert str(caught.value) == (
        f"{message}; the step in {trained.path} was saved for such batches only: pad or convert the batch"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.state().items())


def test_a_package_of_something_else_is_refused(trained: Trained) -> None:
    """A callable is no training step, and neither is one whose description does not fit."""
    package = read_package(trained.path)
    package.metadata = msgspec.structs.replace(package.metadata, purpose="callable")
    with pytest.raises(
        PackageError, match="wanted a package of a training step, got one of a callable"
    ):
        load_step(package)
    package.metadata = msgspec.structs.replace(
        package.metadata, purpose="step", details={"roles": 3}
    )
    with pytest.raises(PackageError, match="got one that does not fit: Expected `array`"):
        load_step(package)


def test_saving_before_there_is_a_program_is_refused(tmp_path: Path) -> None:
    """The program is made by the second step; the message says so."""
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(execution="packaged")
    with PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        step(batch_of(0))
        with pytest.raises(PlanError, match="wanted a compiled step to save, got none before the"):
            step._runner.save(tmp_path / "step.pt2")  # type: ignore[attr-defined]


def summing(model: nn.Module, batch: Any) -> Tensor:
    """Adds up in the batch what it has seen."""
    batch["seen"].add_(batch["x"])
    return model(batch["x"]).square().mean()


def test_what_a_step_writes_into_its_batch_is_in_the_callers(tmp_path: Path) -> None:
    """Also where the program has a copy: of a batch that lies otherwise in memory, and on a GPU always."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, summing, optimizer, Plan(), device="cpu") as step:
        batch = {"x": torch.ones(3, 4), "seen": torch.ones(3, 4)}
        step(batch)
        with config.patch(compile_threads=1):
            path = step.save(tmp_path / "step.pt2", batch)
    again = load(path)
    assert isinstance(again, LoadedStep)
    for seen in (torch.ones(3, 4), torch.ones(4, 3).t()):
        again({"x": torch.ones(3, 4), "seen": seen})
        assert torch.equal(seen, torch.full((3, 4), 2.0))
    package = read_package(path)
    details = {**package.metadata.details, "written": [2]}
    package.metadata = msgspec.structs.replace(package.metadata, details=details)
    with pytest.raises(PackageError, match=r"does not fit: writes into inputs \(2,\) of 2"):
        load_step(package)


def test_state_is_on_the_programs_device_while_it_is_saved() -> None:
    """Counts of steps lie on the host where an optimizer reads them there, and again afterwards."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    before = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    with state_on(optimizer, torch.device("meta")):
        inside = [value for state in optimizer.state.values() for value in state.values()]
        assert {value.device.type for value in inside} == {"meta"}
    after = [(key, value) for state in optimizer.state.values() for key, value in state.items()]
    assert [key for key, _ in after] == [key for key, _ in before]
    assert all(mine is theirs for (_, mine), (_, theirs) in zip(after, before, strict=True))
