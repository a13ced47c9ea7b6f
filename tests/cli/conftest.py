"""A machine, timelines and a task file for the command line."""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

# What takes functions of others by name is imported before a test puts others in their place.
import ridgeline.probe.attempts
import ridgeline.probe.fields  # noqa: F401
from made_host import HOST
from ridgeline.cli.main import main
from ridgeline.machine import (
    Ceiling,
    Collective,
    Device,
    Dispatch,
    Machine,
    Quantity,
    Setting,
    SizePoint,
)
from ridgeline.timeline import Span, Timeline

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ridgeline as rl


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def metric(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).sum()


def task():
    data = TensorDataset(torch.zeros(16, 8), torch.zeros(16, dtype=torch.int64))
    return rl.Task(
        name="tiny",
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)),
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        train_data=data,
        test_data=data,
        metric=metric,
        batch_size=8,
    )
"""


def quantity(value: float, unit: str) -> Quantity:
    return Quantity(value=value, unit=unit, low=value, high=value, n=3, source="measured")


def make_machine() -> Machine:
    settings = (
        Setting(device="cpu", workers=1, threads=2),
        Setting(device="cpu", workers=2, threads=1),
    )
    table = tuple(
        SizePoint(num_bytes=1 << power, seconds=quantity(1e-5 + (1 << power) / 1e9, "s"))
        for power in (10, 20, 26)
    )
    return Machine(
        fingerprint="test",
        measured_at="2026-11-21T10:00:00+00:00",
        host=msgspec.structs.replace(HOST, memory_bytes=8 << 30),
        devices=(Device(kind="cpu", index=0, name="Processor", memory_bytes=8 << 30),),
        ceilings=tuple(
            Ceiling(setting=setting, family=family, dtype="float32", rate=quantity(rate, unit))
            for setting in settings
            for family, rate, unit in (
                ("matmul", 5e10, "FLOP/s"),
                ("elementwise", 1e10, "B/s"),
                ("memory", 1e10, "B/s"),
            )
        ),
        dispatch=tuple(
            Dispatch(device="cpu", phase=phase, seconds=quantity(1e-6, "s"))
            for phase in ("forward", "backward", "optimizer")
        ),
        collectives=tuple(
            Collective(setting=settings[1], operation=operation, backend="gloo", table=table)
            for operation in ("all_reduce", "broadcast")
        ),
    )


def make_timeline(origin: str, step_ns: int) -> Timeline:
    half = step_ns // 2
    spans = (
        Span(name="forward", lane="compute", start_ns=0, end_ns=half),
        Span(name="backward", lane="compute", start_ns=half, end_ns=step_ns),
    )
    return Timeline(origin=origin, title="tiny", workers=1, spans=spans, steps_ns=(step_ns,))


@pytest.fixture
def machine_file(tmp_path: Path) -> str:
    return str(make_machine().save(tmp_path / "machine.json"))


@pytest.fixture
def task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task's directory is added to it
    path = tmp_path / "tiny.py"
    path.write_text(TASK)
    return str(path)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    make_timeline("predicted", 1_000_000).save(folder / "predicted.json")
    make_timeline("measured", 1_100_000).save(folder / "measured.json")
    return folder


class Ran:
    """What a command line did: status, stdout, stderr."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def act(*words: str) -> Ran:
        status = main([str(word) for word in words])
        return Ran(status, *capsys.readouterr())

    return act
