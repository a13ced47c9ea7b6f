"""The worker's side of a launch: its log, its end with the parent's, and its last words.

What ends a worker is written to a small JSON file before anything is torn down, so that the parent can
distinguish the first cause from the errors of peers that only lost their connection.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from ridgeline.codec import Value, write_atomically
from ridgeline.errors import RidgelineError

LOGS = "logs"
_PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""
_WATCH_S = 0.5


class LastWords(Value, frozen=True, kw_only=True):
    """Why a worker ended. `kind` is the exception's class; `place` the line that raised it."""

    rank: int
    kind: str
    message: str
    place: str
    is_ridgeline: bool
    time_ns: int


def log_path(run_dir: Path, rank: int) -> Path:
    """Where a worker's output goes."""
    return run_dir / LOGS / f"rank-{rank}.log"


def last_words_path(run_dir: Path, rank: int) -> Path:
    """Where a worker says why it ended."""
    return run_dir / LOGS / f"rank-{rank}.error.json"


def redirect_output(path: Path) -> None:
    """Append everything this process writes, from C++ too, to a log file.

    Raises:
        OSError: the file cannot be opened.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    # File descriptors, not `sys.stdout`: C++ writes to these.
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    faulthandler.enable()


def end_with_parent(parent: int) -> None:
    """Let this process be killed when the process `parent` ends, however that happens.

    An interrupt ends it at once too: a worker that waits inside a collective would not notice a
    Python-level KeyboardInterrupt.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="ridgeline-parent", daemon=True).start()


@contextlib.contextmanager
def last_words(run_dir: Path, rank: int) -> Iterator[None]:
    """Record the exception that leaves the block, print it to the log, and end the process with 1.

    The process ends without teardown: leaving a process group whose peers are gone may wait for ever.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever ends a worker is reported to its parent
        write_atomically(
            last_words_path(run_dir, rank), msgspec.json.encode(_describe(rank, error))
        )
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def end_well() -> NoReturn:
    """End this process with 0, without tearing the interpreter down.

    A measuring process was once seen to abort at its exit, most likely over a thread of torch that was
    still ending; here that would make a finished training look like a crash. All results are in files.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def read_last_words(run_dir: Path, rank: int) -> LastWords | None:
    """Why a worker ended, if it could say."""
    path = last_words_path(run_dir, rank)
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=LastWords)


def _describe(rank: int, error: Exception) -> LastWords:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return LastWords(
        rank=rank,
        kind=type(error).__name__,
        message=str(error),
        place=place,
        is_ridgeline=isinstance(error, RidgelineError),
        time_ns=time.time_ns(),
    )
