"""Trying a doubtful capture in a process of its own, which may be ruined by it.

A failed capture can leave the device unusable. So what the linter cannot judge is first run in a fresh
child: the step is written to a private file, rebuilt there, run, and the child's end is returned as a value.

This is the one place where Ridgeline uses pickle: through a file that this process writes into a directory
only its user may enter, that its own child reads at once, and that is deleted afterwards. Nothing from
outside is ever unpickled.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch.optim import Optimizer

from ridgeline.errors import CaptureError, RidgelineError
from ridgeline.host.signal_names import signal_name
from ridgeline.lint import step_pickle
from ridgeline.lint.child_modules import unfound_modules
from ridgeline.lint.child_worker import (
    LOG,
    MODULES,
    PAYLOAD,
    TRIAL_VARIABLE,
    is_trial,
    last_lines,
    read_report,
)
from ridgeline.lint.lint import StepToLint
from ridgeline.plan import Plan

LIMIT_S = 300.0
"""A start takes seconds, compiling a large model minutes."""

STEPS = 6
"""Three eager ones, one that captures and checks, two replays."""

_WORKER = "ridgeline.lint.child_worker"
_STEPS = "ridgeline.runtime.steps.step_trial:run_steps"
_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC",
)
_UNWRITABLE = (
    pickle.PicklingError, AttributeError, TypeError, RuntimeError, OSError, RidgelineError,
)  # fmt: skip
"""What writing objects that belong to a process ends in."""


class TrialOutcome(NamedTuple):
    """How a trial in a child process ended.

    Attributes:
        status: `ok`; `failed` (it raised, crashed or did not end); `not-tried`.
        text: What went wrong, or why there was no trial; empty for `ok`.
        seconds: Wall time, the start of the process included.
    """

    status: Literal["ok", "failed", "not-tried"]
    text: str
    seconds: float

    def __str__(self) -> str:
        if self.status == "ok":
            return f"ran well in a child process ({self.seconds:.1f} s)"
        words = "failed" if self.status == "failed" else "could not be tried"
        return f"{words} in a child process: {self.text}"


def try_in_child(
    program: str | Callable[..., Any], payload: Mapping[str, Any], *, limit_s: float = LIMIT_S
) -> TrialOutcome:
    """Call `program(**payload)` in a fresh Python process, and say how that ended.

    The child has this process's module path, working directory and environment, less what a launcher of
    several workers set. Whatever it started ends with it.

    Args:
        program: A function by `"module:name"`, or one that can be imported.
        payload: Keyword arguments: whatever `step_pickle` can write, models and optimizers included.
        limit_s: Kill the child when it takes longer.

    Cost: Blocks; a new interpreter with torch, a copy of the payload on disk and in the child's memory.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ridgeline-trial-") as name:
        directory = Path(name)
        status, text = _prepare(directory, payload)
        if status == "ok":
            if not isinstance(program, str):
                program = f"{program.__module__}:{program.__qualname__}"
            status, text = _run(directory, program, limit_s)
    return TrialOutcome(status, text, time.perf_counter() - begin)


def try_step_in_child(
    body: StepToLint, batch: Any, plan: Plan, *, steps: int = STEPS, limit_s: float = LIMIT_S
) -> TrialOutcome:
    """Run some training steps under `plan` in a child process, on copies of model, optimizer and batch.

    The child is a worker alone: collectives are not part of the trial.

    Args:
        body: The step.
        batch: One batch, on the device.
        plan: The plan to try; its numbers of workers are set to one.
        steps: Calls of the step.
        limit_s: Kill the child when it takes longer.

    Cost: See `try_in_child`; on a GPU the child needs the step's memory a second time.
    """
    alone = msgspec.structs.replace(plan, workers=1, layout=None, choices=())
    payload = {
        "model": body.model,
        "loss_fn": body.loss_fn,
        "optimizer": body.optimizer,
        "attributes": _own_attributes(body.optimizer),
        "batch": batch,
        "plan": alone,
        "clip_norm": body.clip_norm,
        "device": next(iter(body.model.parameters())).device.type,
        "steps": steps,
    }
    return try_in_child(_STEPS, payload, limit_s=limit_s)


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps beside settings and state, which pickle leaves out: a count, say.

    Schedulers put a method of their own there, which counts its calls.
    """
    empty = vars(torch.optim.Optimizer([torch.zeros((), device="cpu")], {}))
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in empty and not isinstance(value, FunctionType | MethodType)
    }


def check_trial(outcome: TrialOutcome, doubts: Sequence[object]) -> str:
    """What to note of a trial that was made because of `doubts`.

    Raises:
        CaptureError: it failed.
    """
    listed = "; ".join(str(doubt) for doubt in doubts)
    if outcome.status == "failed":
        raise CaptureError(
            f"wanted a program that a CUDA graph can hold, got one that {outcome}; this process did not try. "
            f"What could not be judged by looking: {listed}. Replace it, or choose a mode without a graph"
        )
    return f"doubtful capture {outcome}; doubts: {listed}"


def _prepare(directory: Path, payload: Mapping[str, Any]) -> tuple[Literal["ok", "not-tried"], str]:
    """Write the payload and what the child must import from files; why there is no trial."""
    if is_trial():
        return "not-tried", "this process is such a child itself"
    file = directory / PAYLOAD
    try:
        # `torch.save` and not pickle: tensors go as bytes, and those that share memory share it in the child.
        torch.save(dict(payload), file, pickle_module=step_pickle)
    except _UNWRITABLE as error:
        return "not-tried", (
            "wanted a model, loss function, optimizer and batch that a new process can rebuild, got "
            f"{type(error).__name__}: {error}; keep such objects out of them and of what their code reads"
        )
    (directory / MODULES).write_bytes(msgspec.json.encode(unfound_modules(file)))
    return "ok", ""


def _run(
    directory: Path, program: str, limit_s: float
) -> tuple[Literal["ok", "failed", "not-tried"], str]:
    """Start the child, wait for its end, and leave nothing of it behind."""
    with (directory / LOG).open("wb") as log:
        child = subprocess.Popen(
            [
                sys.executable,
                # The working directory must not hide modules of the path that is handed on by `PYTHONPATH`.
                "-P",
                "-u",  # its last output is reported when it is killed
                "-m",
                _WORKER,
                str(directory),
                program,
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(),
            # A session of its own, so that compilers that it starts can be killed with it.
            start_new_session=True,
        )
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return "failed", f"it did not end within {limit_s:g} s{last_lines(directory)}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # compilers that it started, too
        child.wait()
    # A negative code is the signal that ended it; a crash in native code looks like this.
    if code < 0:
        return "failed", f"it was killed by {signal_name(-code)}{last_lines(directory)}"
    report = read_report(directory)
    if report is None:
        return "failed", f"it ended with status {code} and no report{last_lines(directory)}"
    # No word on the step: only the child could not be given it.
    if report.stage == "load":
        return "not-tried", (
            f"wanted the step rebuilt in the child, got {report.message}; what it is made of must be "
            "importable there"
        )
    return ("ok", "") if report.stage == "done" else ("failed", report.message)


def child_environment() -> dict[str, str]:
    """Variables of a process that tries something: those of this one, less what a launcher has set."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_VARIABLES)
    }
    # The empty entry means the directory of whoever reads it.
    places = [place or str(Path.cwd()) for place in sys.path]
    return environment | {"PYTHONPATH": os.pathsep.join(places), TRIAL_VARIABLE: "1"}
