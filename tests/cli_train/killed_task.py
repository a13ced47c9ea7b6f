"""The task of these tests in a worker that is killed at a file operation, as the environment says."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import ridgeline as rl

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "runtime_loop")]
_armed = contextlib.ExitStack()


def _arm(root: str, stop: str) -> None:
    from killing import Disk

    disk = Disk(Path(root), stop, kill=lambda: os.kill(os.getpid(), signal.SIGKILL))
    _armed.enter_context(disk.patched())


def task(data_dir: str | None = None) -> rl.Task:
    from training_tasks import task as plain

    if os.environ.get("RANK") == "0" and "KILL_AT" in os.environ:
        _arm(os.environ["KILL_IN"], os.environ["KILL_AT"])
    return plain(data_dir)
