"""Trials in a child process: however the child ends, the parent is told, and nothing is left."""

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from ridgeline.errors import CaptureError
from ridgeline.lint.child_trial import (
    TrialOutcome,
    check_trial,
    try_in_child,
    try_step_in_child,
)
from ridgeline.lint.child_worker import TRIAL_VARIABLE
from ridgeline.lint.lint import Doubt, Lint, is_doubtful
from ridgeline.plan import Plan
from ridgeline.runtime.steps.body.body import StepBody
from warm import ADDRESS


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return importlib.import_module("child_programs")


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process itself is tested: its environment, and how it ends; else a fork of a warm one serves."""
    monkeypatch.delenv(ADDRESS)


def trials_left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("ridgeline-trial-*"))


@pytest.mark.usefixtures("own_process")
def test_success(programs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that returns is `ok`; it got the payload, is no worker, and its directory is gone."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MINE", "kept")
    payload = {"value": torch.tensor([1.0, 2.0]), "number": 7}
    outcome = try_in_child(programs.check_inputs, payload)
    assert outcome.status == "ok", outcome
    assert outcome.text == ""
    assert str(outcome) == f"ran well in a child process ({outcome.seconds:.1f} s)"
    assert trials_left(tmp_path) == []


def test_exception(programs: ModuleType) -> None:
    """An exception is told with class and message."""
    outcome = try_in_child(programs.fail, {})
    assert outcome[:2] == ("failed", "ValueError: on purpose")
    assert str(outcome) == "failed in a child process: ValueError: on purpose"


@pytest.mark.usefixtures("own_process")
def test_killed(programs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal is told by name, with the last output, which nobody had the time to flush."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    outcome = try_in_child(programs.die, {})
    assert outcome[:2] == ("failed", "it was killed by SIGKILL; its last output: last words")


@pytest.mark.usefixtures("own_process")
def test_silent_end(programs: ModuleType) -> None:
    """A child that ends without a report has failed."""
    outcome = try_in_child(programs.leave, {})
    assert outcome[:2] == ("failed", "it ended with status 3 and no report")


@pytest.mark.usefixtures("own_process")
def test_hang(programs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that does not end is killed with all that it started, and reaped."""
    note = tmp_path / "pid"
    os.mkfifo(note)
    wait = subprocess.Popen.wait
    told: list[int] = []

    def wait_for_note(self: Any, timeout: float | None = None) -> int:
        if not told:
            told.append(int(note.read_text()))  # blocks until the child has come that far
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_note)
    outcome = try_in_child(programs.hang, {"path": str(note)}, limit_s=0.01)
    assert outcome[:2] == ("failed", "it did not end within 0.01 s")
    with contextlib.suppress(psutil.NoSuchProcess):  # at whichever call it has gone
        grandchild = psutil.Process(told[0])
        psutil.wait_procs([grandchild], timeout=60.0)  # it may still be on its way out
        assert grandchild.status() == psutil.STATUS_ZOMBIE


def test_lock(programs: ModuleType, tmp_path: Path) -> None:
    """What nobody can write is not tried, and no child is started."""
    outcome = try_in_child(programs.take, {"value": threading.Lock()})
    assert outcome.status == "not-tried"
    assert outcome.text == (
        "wanted a model, loss function, optimizer and batch that a new process can rebuild, got TypeError: cannot "
        "pickle '_thread.lock' object; keep such objects out of them and of what their code reads"
    )
    assert str(outcome).startswith("could not be tried in a child process: wanted a model")
    assert trials_left(tmp_path) == []


def test_not_rebuilt(programs: ModuleType) -> None:
    """What the child cannot read again was not tried either."""
    outcome = try_in_child(programs.take, {"value": programs.Unloadable()})
    assert outcome.status == "not-tried"
    assert outcome.text == (
        "wanted the step rebuilt in the child, got OSError: cannot be read here; what it is made of must be "
        "importable there"
    )


def test_no_child_of_a_child(programs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a child nothing is doubtful enough for another one."""
    doubts = (Doubt("operator mine.op", "net.py:3 in forward"),)
    assert is_doubtful(Lint((), doubts))
    monkeypatch.setenv(TRIAL_VARIABLE, "1")
    assert not is_doubtful(Lint((), doubts))
    outcome = try_in_child(programs.fail, {})
    assert outcome[:2] == ("not-tried", "this process is such a child itself")


def make_body(programs: ModuleType, loss_fn: Any) -> StepBody:
    model = programs.Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    device = torch.device("cpu")
    return StepBody(model, loss_fn, optimizer, Plan(), None, clip_norm=1.0, device=device)


BATCH = (torch.ones(4, 3), torch.zeros(4, dtype=torch.int64))


def test_step(programs: ModuleType) -> None:
    """A step is rebuilt and run under the plan, alone; the parent's parameters stay."""
    body = make_body(programs, programs.loss_fn)
    before = [parameter.clone() for parameter in body.model.parameters()]
    outcome = try_step_in_child(body, BATCH, Plan(workers=2), steps=2)
    assert outcome.status == "ok", outcome
    for parameter, old in zip(body.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def test_an_optimizer_keeps_its_attributes(programs: ModuleType) -> None:
    """Pickle writes settings and state only; a count of its own is there in the child as well."""
    body = make_body(programs, programs.loss_fn)
    body.optimizer = programs.Counting(body.model.parameters())
    torch.optim.lr_scheduler.StepLR(body.optimizer, 1)
    outcome = try_step_in_child(body, BATCH, Plan(), steps=2)
    assert outcome.status == "ok", outcome
    assert body.optimizer.count == 0


def test_step_fails(programs: ModuleType) -> None:
    """The error of a step is told."""
    outcome = try_step_in_child(make_body(programs, programs.wrong_loss_fn), BATCH, Plan())
    assert outcome[:2] == ("failed", "ValueError: this loss never works")


@pytest.mark.parametrize("execution", ["eager", "step-graph"])
def test_local_definitions(execution: Any, programs: ModuleType) -> None:
    """A loss and a model that a function has defined go to the child themselves, with what they read."""
    scale = torch.tensor(0.5)

    class Local(programs.Net):  # type: ignore[name-defined, misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scale * super().forward(x)

    body = make_body(programs, lambda model, batch: scale * programs.loss_fn(model, batch))
    model = Local()
    body.model, body.optimizer = model, torch.optim.SGD(model.parameters(), 0.1)
    outcome = try_step_in_child(body, BATCH, Plan(execution=execution), steps=2)
    assert outcome.status == "ok", outcome


SCRIPT = """
import torch
FACTOR = 2

class Value:
    def number(self):
        return FACTOR

def check():
    if type(Value()) is not Value or Value().number() != 2:
        raise ValueError(FACTOR)

started.append(1)
"""


@pytest.mark.parametrize("is_file", [True, False], ids=["script", "session"])
def test_main_module(
    is_file: bool, programs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a script or a session defines goes to the child by value: nothing of it runs there again."""
    module = ModuleType("__main__")
    module.__dict__["started"] = []
    exec(SCRIPT, module.__dict__)
    if is_file:
        (tmp_path / "train.py").write_text(SCRIPT)
        module.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", module)
    payload = {"value": module.Value(), "check": module.check}
    outcome = try_in_child(programs.call, payload)
    assert outcome.status == "ok", outcome
    module.FACTOR = 3
    assert try_in_child(programs.call, payload)[:2] == ("failed", "ValueError: 3")


def test_a_module_run_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a framework registers under a name that no search finds is run in the child from its file."""
    file = tmp_path / "settings.py"
    file.write_text(
        "class Value:\n    pass\n\ndef program(*, value):\n    assert type(value) is Value\n"
    )
    spec = importlib.util.spec_from_file_location("configuration_of_mine", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "configuration_of_mine", module)
    spec.loader.exec_module(module)
    outcome = try_in_child(module.program, {"value": module.Value()})
    assert outcome.status == "ok", outcome


def test_check_trial() -> None:
    """A failed trial is an error that lists the doubts; any other is a note."""
    doubts = [Doubt("operator mine.op", "net.py:3 in forward")]
    with pytest.raises(CaptureError) as caught:
        check_trial(TrialOutcome("failed", "it was killed by SIGSEGV", 1.0), doubts)
    assert str(caught.value) == (
        "wanted a program that a CUDA graph can hold, got one that failed in a child process: it was killed by "
        "SIGSEGV; this process did not try. What could not be judged by looking: operator mine.op at net.py:3 in "
        "forward. Replace it, or choose a mode without a graph"
    )
    assert check_trial(TrialOutcome("ok", "", 1.0), doubts) == (
        "doubtful capture ran well in a child process (1.0 s); doubts: operator mine.op at net.py:3 in forward"
    )
