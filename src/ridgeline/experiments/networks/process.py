"""Asking a child: one process (or one group of workers) for a task, with its own caches and a deadline."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from ridgeline.codec import write_atomically
from ridgeline.experiments.networks.request import NetworkAnswer, NetworkRequest

CHILD = "ridgeline.experiments.networks.sides.child"
GRACE_S = 10.0
"""What children may take to end when asked to."""
LONGEST_TAIL = 300
ENDED = "the experiment was ended"
UNTOLD = ("raise ", "^", "~", "=====", "-----")
"""How lines of a log begin that name no error."""


class ChildReply(NamedTuple):
    """What a child wrote, be it a part, and why there is no more; `reason` is empty when it ended well."""

    answer: NetworkAnswer
    reason: str


class Children:
    """The children that run now; `ask` may be called by several threads at a time."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def ask(
        self,
        request: NetworkRequest,
        folder: Path,
        *,
        workers: int,
        environment: Mapping[str, str],
        limit_s: float,
    ) -> ChildReply:
        """Have a task done, and wait for it.

        Args:
            request: The task.
            folder: Gets the request, the answer and the log of the child.
            workers: Processes that train together.
            environment: What is set for it beside this process's own.
            limit_s: It is ended after so many seconds.
        """
        name = request.task.replace(" ", "-")
        question = folder / f"{name}.request.json"
        write_atomically(question, msgspec.json.encode(request))
        log = folder / f"{name}.log"
        answer = Path(request.answer)
        # The answer of another task would be taken for that of this one.
        answer.unlink(missing_ok=True)
        # Unbuffered, so that the log of a child that is ended has its last lines.
        command = [sys.executable, "-P", "-u", "-m"]
        if workers > 1:
            command += [
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={workers}",
                "-m",
            ]
        with log.open("wb") as file:
            child = subprocess.Popen(
                [*command, CHILD, str(question)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": _python_path(), **environment},
            )
            self._running.add(child)
            try:
                # Asked once it is among those: `end`, which sets this first, has seen it or is seen here.
                if self._is_over:
                    _end(child)
                code = child.wait(limit_s)
                # Whoever ends a child collects its status, and 0 is left for this wait.
                reason = ENDED if self._is_over else "" if code == 0 else _why(code, log)
            except subprocess.TimeoutExpired:
                reason = f"it was ended after {limit_s:.0f} s"
            finally:
                _end(child)
                self._running.discard(child)
        # A child that failed may have written what it knew by then.
        if not answer.exists():
            return ChildReply(NetworkAnswer(), reason or "it ended without an answer")
        told = msgspec.json.decode(answer.read_bytes(), type=NetworkAnswer)
        return ChildReply(told, f"{reason} while {told.doing}" if reason and told.doing else reason)

    def end(self) -> None:
        """End those that run, with all that they started, and any that is begun from now on."""
        self._is_over = True
        for child in list(self._running):
            _end(child)


def last_error(log: str) -> str:
    """The last line of a log that says what went wrong."""
    lines = [line.strip() for line in log.splitlines()]
    told = [line for line in lines if line and not line.startswith(UNTOLD)]
    named = [line for line in told if "Error" in line.split(":")[0].split(" ")[0]]
    return (named or told or ["nothing in its log"])[-1][:LONGEST_TAIL]


def _why(code: int, log: Path) -> str:
    how = f"signal {-code}" if code < 0 else f"status {code}"
    return f"ended with {how}: {last_error(log.read_text(errors='replace'))}"


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End a child with all that it started; an agent's workers are in sessions of their own."""
    if child.poll() is not None:
        return
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(child.pid)
        # Listed before any ends: children of a process that is gone cannot be found.
        family = [root, *root.children(recursive=True)]
    for act in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)
        _, family = psutil.wait_procs(family, timeout=GRACE_S)
    child.wait()


def _python_path() -> str:
    """The child finds the modules that this process does; -P keeps the working directory out otherwise."""
    return os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
