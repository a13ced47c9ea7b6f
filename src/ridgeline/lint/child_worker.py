"""The child's side of a trial: rebuild what the parent wrote, run it, report, and end at once."""

import os
import resource
import sys
import traceback
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

import msgspec
import torch

from ridgeline.codec import Value, write_atomically
from ridgeline.lint.child_modules import import_modules
from ridgeline.workers.worker_process import end_well, end_with_parent

PAYLOAD = "payload.pt"
MODULES = "modules.json"
REPORT = "report.json"
LOG = "output.log"
_LOG_LINES = 3
TRIAL_VARIABLE = "RIDGELINE_CHILD_TRIAL"
"""Set in a child, so that what it runs does not start children again."""


class Report(Value, frozen=True, kw_only=True):
    """How far the child came: `load` and `run` say where it failed, `done` that it did not."""

    stage: Literal["load", "run", "done"]
    message: str = ""


def is_trial() -> bool:
    """Whether this process is a child that tries something for its parent."""
    return TRIAL_VARIABLE in os.environ


def read_report(directory: Path) -> Report | None:
    """The child's report, if it could write one."""
    path = directory / REPORT
    return msgspec.json.decode(path.read_bytes(), type=Report) if path.exists() else None


def last_lines(directory: Path) -> str:
    """What the child printed last, to end a sentence."""
    text = (directory / LOG).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    return f"; its last output: {' | '.join(lines)}" if lines else ""


def main(directory: str, program: str, parent: str) -> None:
    """Run `program` on the payload in `directory`; the report says how it went."""
    end_with_parent(int(parent))
    # A crash is an answer here; writing out the memory of a process with a GPU can take minutes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    report = _attempt(Path(directory), program)
    write_atomically(Path(directory) / REPORT, msgspec.json.encode(report))
    end_well()  # a process that failed to capture may hang in its own teardown


def _attempt(directory: Path, program: str) -> Report:
    stage: Literal["load", "run"] = "load"
    try:
        import_modules(msgspec.json.decode((directory / MODULES).read_bytes(), type=dict[str, str]))
        # Written a moment ago by the parent, into a directory of its own: see `child_trial`.
        payload = torch.load(directory / PAYLOAD, weights_only=False)
        # Still in the stage of loading: a program that cannot be imported says nothing about its step.
        function = resolve_name(program)
        stage = "run"
        function(**payload)
    except Exception as error:  # noqa: BLE001 - whatever it was is reported to the parent
        traceback.print_exc()
        return Report(stage=stage, message=f"{type(error).__name__}: {error}")
    return Report(stage="done")


if __name__ == "__main__":
    main(*sys.argv[1:])
