"""Run directories: their files, their names, and when one may be written to.

machine.json workload.json ranking.json plan.json predicted.json expected.json measured.json
verdict.json history.json trace.json.gz report.html request.json checkpoints/ logs/ blackbox/
"""

import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from ridgeline.codec import Noun
from ridgeline.decision.heartbeat import Say
from ridgeline.errors import CheckpointError, FileFormatError
from ridgeline.history import History

N = TypeVar("N", bound=Noun)

HOME = Path("runs")
MACHINE = "machine.json"
WORKLOAD = "workload.json"
RANKING = "ranking.json"
PLAN = "plan.json"
PREDICTED = "predicted.json"
EXPECTED = "expected.json"
"""The prediction as the plan's trial corrected it; runs of earlier releases lack it."""
MEASURED = "measured.json"
VERDICT = "verdict.json"
HISTORY = "history.json"
REQUEST = "request.json"
PENDING = "request.pending.json"
"""What a resumed run is asked for, until its workers have taken it up; then it is `REQUEST`."""


def if_there(noun: type[N], path: Path) -> N | None:
    """What a file holds; None where there is none.

    Raises:
        FileFormatError: the file holds something else.
    """
    return noun.load(path) if path.is_file() else None


def check_has(run_dir: Path, names: Sequence[str], instead: str) -> None:
    """A finished run has left these files.

    Raises:
        FileFormatError: one of them is not there.
    """
    missing = [name for name in names if not (run_dir / name).is_file()]
    if missing:
        raise FileFormatError(
            f"wanted the directory of a finished run, got no {' and no '.join(missing)} in {run_dir}; "
            f"{instead}"
        )


def fresh(task: str) -> Path:
    """`runs/<task>-<date>-<n>` with the first number that is free."""
    stem = f"{Path(task).stem}-{datetime.date.today():%Y%m%d}"
    number = 1
    while (HOME / f"{stem}-{number}").exists():
        number += 1
    return HOME / f"{stem}-{number}"


def newest(task: str) -> Path:
    """The run of the task that was started last, among those with default names.

    Raises:
        CheckpointError: there is none.
    """
    # The whole name: that of another task may begin like this one's.
    stem = Path(task).stem
    name = re.compile(rf"{re.escape(stem)}-\d{{8}}-\d+")
    runs = [
        path for path in HOME.glob("*") if name.fullmatch(path.name) and (path / REQUEST).is_file()
    ]
    if not runs:
        raise CheckpointError(
            f"wanted a run of {task} to resume, got none named {stem}-DATE-NUMBER in {HOME}/; name its "
            "directory with -o"
        )
    # By the request, which is written when workers start, and again when a run is resumed.
    return max(runs, key=lambda path: (path / REQUEST).stat().st_mtime_ns)


def of_run(task: str, given: Path | None) -> Path:
    """The directory of the run that is to be resumed.

    Raises:
        CheckpointError: there is no run.
    """
    path = given or newest(task)
    if not (path / REQUEST).is_file():
        is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        advice = (
            "leave out --resume to start one there"
            if is_free
            else "name the directory of a run with -o, or start one in a new directory"
        )
        raise CheckpointError(f"wanted a run to resume, got no {REQUEST} in {path}; {advice}")
    return path


def check_unfinished(run_dir: Path, epochs: int, say: Say) -> Path | None:
    """The checkpoint that a resumed run starts from; None where none was completed: it starts again.

    Args:
        run_dir: Of the run.
        epochs: That it shall have in all.
        say: Called with which checkpoint that is, and why newer ones are skipped.

    Raises:
        CheckpointError: all epochs are done and reported already, or there are checkpoints but none is whole.
    """
    from ridgeline.runtime.checkpoints import (
        checkpoint_directory,  # these need torch
        resuming,  # these need torch
    )

    found = resuming.find(run_dir / checkpoint_directory.NAME)
    if found is None:
        return None
    if found.position.epoch >= epochs and _is_concluded(run_dir, epochs):
        raise CheckpointError(
            f"wanted epochs left to train, got all {epochs} done in {found.path}; raise --epochs if the "
            f"schedule of the learning rate allows it, or run `ridgeline report {run_dir}` to see how it went"
        )
    for line in found.lines:
        say(line)
    return found.path


def _is_concluded(run_dir: Path, epochs: int) -> bool:
    """Whether a run whose steps are all done wrote down how it went; one killed at its end did not."""
    history = if_there(History, run_dir / HISTORY)
    is_judged = history is not None and (run_dir / VERDICT).is_file()
    return is_judged and len(history.epochs) >= epochs
