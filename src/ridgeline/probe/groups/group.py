"""Run a function in a group of worker processes on this host, and bring home the reply of rank 0.

Workers are fresh interpreters (`group_worker`), so the caller's threads, heap, random state and `__main__`
stay out of it. Each joins a process group over gloo or NCCL before the function is called. A group may be
started ahead of its request: interpreters, torch and a GPU's context take seconds.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from ridgeline.closing import Closing
from ridgeline.codec import write_atomically
from ridgeline.errors import LaunchError
from ridgeline.execution import thread_variables
from ridgeline.probe.groups import group_worker
from ridgeline.probe.groups.worker_error import WorkerError as WorkerError
from ridgeline.probe.groups.worker_error import failure, lateness, standstill

GRACE_S = 3.0
"""How long a worker may take to end after SIGTERM before it gets SIGKILL."""
SETTLE_S = 0.5
"""How long peers of a failed worker may take to fail too, so that the first one can be told."""
_POLL_S = 0.02
_LOOK_S = 0.5

Kind = tuple[str, int, int, str, int]


class Group(Closing):
    """Worker processes on this host, which serve one call; used as a context, whose end ends them.

    Args: as of `run_in_group`, but `deadline_s`: seconds that a collective may take; infinite for
    `group_worker.WAITING_S`.

    Raises:
        LaunchError: the arguments are wrong.

    Cost: Starts interpreters, which import torch; does not wait for them.
    """

    def __init__(
        self,
        target: str,
        *,
        workers: int,
        threads: int,
        device: str,
        deadline_s: float = math.inf,
        first_gpu: int = 0,
        environment: Mapping[str, str] | None = None,
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        if workers < 1 or device not in ("cpu", "cuda") or target.count(":") != 1:
            raise LaunchError(
                "wanted workers >= 1, device cpu or cuda and a target module:function, got "
                f"workers={workers}, device={device!r}, target={target!r} in run_in_group; correct them"
            )
        self._kind: Kind | None = (target, workers, threads, device, first_gpu)
        self._begun_s = time.monotonic()
        self._target = target
        self._processes: list[subprocess.Popen[bytes]] = []
        # Until all have started nobody else can end those that did.
        with ExitStack() as stack:
            folder = tempfile.TemporaryDirectory(prefix="ridgeline-group-")
            name = stack.enter_context(folder)
            self._directory = Path(name)
            stack.callback(_end, self._processes)
            for rank in range(workers):
                log = stack.enter_context((self._directory / f"output.{rank}").open("wb"))
                command = [name, target, device, str(first_gpu)]
                variables = _environment(rank, workers, threads, deadline_s)
                # What the caller names wins: it knows more of its workers than the defaults.
                variables |= dict(environment or {})
                prefix = prefixes[rank] if prefixes else ()
                self._processes.append(_started(prefix, command, variables, log))
            self._stack = stack.pop_all()

    def call(
        self,
        request: bytes,
        *,
        deadline_s: float,
        environment: Mapping[str, str] | None = None,
        hanging: Callable[[], int | None] | None = None,
    ) -> bytes:
        """The reply of rank 0; see `run_in_group`. `environment` is added before the function is called."""
        # Workers wait for this file, and must never find half of it.
        write_atomically(
            self._directory / group_worker.CALL,
            msgspec.json.encode(group_worker.WorkerRequest(request, dict(environment or {}))),
        )
        _wait(self._processes, self._directory, self._target, deadline_s, hanging or (lambda: None))
        reply = self._directory / group_worker.REPLY
        if not reply.exists():
            raise LaunchError(
                f"wanted a reply of rank 0 from {self._target}, got none although all "
                f"{len(self._processes)} workers ended well; the function must return bytes instead of "
                "leaving the interpreter"
            )
        return reply.read_bytes()

    @property
    def age_s(self) -> float:
        """Seconds for which its workers have been starting or have waited for a call; 0 once it is closed."""
        return 0.0 if self._kind is None else time.monotonic() - self._begun_s

    def serves(self, kind: Kind) -> bool:
        """Whether it waits for a call of this kind: target, workers, threads, device and first GPU."""
        return self._kind == kind

    def close(self) -> None:
        """End every worker that still runs; may be called again."""
        self._kind = None
        self._stack.close()


def run_in_group(
    target: str,
    request: bytes,
    *,
    workers: int,
    threads: int,
    device: str,
    deadline_s: float = 300.0,
    first_gpu: int = 0,
    environment: Mapping[str, str] | None = None,
    hanging: Callable[[], int | None] | None = None,
    prefixes: Sequence[Sequence[str]] = (),
    group: Group | None = None,
) -> bytes:
    """The reply of rank 0 to `request`, computed by `workers` processes that run at once.

    Every worker imports the target and calls it as `function(request: bytes) -> bytes` with
    `torch.distributed` initialised, `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and `OMP_NUM_THREADS` set.

    Args:
        target: `module:function`, importable by the caller.
        request: Passed to every worker as it is; JSON by custom.
        workers: Number of processes, at least 1.
        threads: Threads of torch in each worker; 0 leaves the default.
        device: `cpu` (gloo) or `cuda` (NCCL, worker k on GPU `first_gpu` + k).
        deadline_s: Seconds after which the group is ended; infinite for none: only collectives end then.
        first_gpu: The GPU of rank 0.
        environment: Variables to add to those of the workers.
        hanging: Asked about twice a second for a rank that makes no progress; then the group is ended.
        prefixes: What precedes the command of each worker, by rank, and runs it in its own process, e.g. in
            another network namespace; empty for nothing.
        group: One that was started ahead, and is used where it serves that; ended by this in any case.

    Raises:
        WorkerError: a worker failed, was killed or hangs, or the deadline passed. All others are ended first.
        LaunchError: the arguments are wrong, or rank 0 left no reply.

    Cost: Starts interpreters and imports torch in each: about 2 s.
    """
    if group is not None and not group.serves((target, workers, threads, device, first_gpu)):
        # Its processes would otherwise run beside those that measure.
        group.close()
        group = None
    if group is None:
        group = Group(
            target,
            workers=workers,
            threads=threads,
            device=device,
            deadline_s=deadline_s,
            first_gpu=first_gpu,
            environment=environment,
            prefixes=prefixes,
        )
    with group:
        return group.call(request, deadline_s=deadline_s, environment=environment, hanging=hanging)


def _started(
    prefix: Sequence[str], arguments: list[str], environment: dict[str, str], log: BinaryIO
) -> "subprocess.Popen[bytes]":
    """A worker process; its standard input is its lifeline."""
    return subprocess.Popen(
        # Without the directory of the caller in front, where a file may be called like a module.
        [*prefix, sys.executable, "-P", "-u", "-m", group_worker.__name__, *arguments],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
    )


def _environment(rank: int, workers: int, threads: int, deadline_s: float) -> dict[str, str]:
    environment = dict(
        os.environ,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(workers),
        LOCAL_WORLD_SIZE=str(workers),
        MASTER_ADDR="127.0.0.1",
        RIDGELINE_GROUP_DEADLINE_S=str(deadline_s),
        PYTHONUNBUFFERED="1",
        # The workers find the same modules as the caller, a script's own directory included.
        PYTHONPATH=os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
    )
    environment.update(thread_variables(threads, os.environ))
    # A rendezvous inherited from torchrun belongs to the caller's group, not to this one.
    inherited = ("MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE")
    return {name: value for name, value in environment.items() if name not in inherited}


def _wait(
    processes: list[subprocess.Popen[bytes]],
    directory: Path,
    target: str,
    deadline_s: float,
    hanging: Callable[[], int | None],
) -> None:
    """Wait until all workers ended well; end all and raise for the first that did not."""
    limit = time.monotonic() + deadline_s
    next_look = 0.0
    while True:
        codes = [process.poll() for process in processes]
        if any(codes):  # a code other than None and 0
            # The others fail within moments, of lost connections; the earliest is the cause.
            failed = _settle(processes)
            _end(processes)
            raise failure(target, len(processes), failed, directory)
        if all(code == 0 for code in codes):
            return
        # After the codes: workers that ended in time are no late ones, however late this looks.
        if time.monotonic() > limit:
            late = next(rank for rank, code in enumerate(codes) if code is None)
            _end(processes)
            raise lateness(target, len(processes), late, deadline_s, directory)
        if time.monotonic() > next_look:
            next_look = time.monotonic() + _LOOK_S
            stuck = hanging()
            if stuck is not None:
                _end(processes)
                raise standstill(target, len(processes), stuck, directory)
        time.sleep(_POLL_S)


def _settle(processes: list[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Failed ranks and their exit codes, after giving those that fail right now time to say so."""
    limit = time.monotonic() + SETTLE_S
    while time.monotonic() < limit and any(process.poll() is None for process in processes):
        time.sleep(_POLL_S)
    return {
        rank: process.returncode for rank, process in enumerate(processes) if process.returncode
    }


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End every worker that still runs, and what it started (compilers that hang), and collect it."""
    # Listed first: children of a process that has ended cannot be found by it any more.
    started = [child for process in processes for child in _descendants(process)]
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()  # the worker's lifeline
        if process.poll() is None:
            # SIGTERM to all before waiting for any, so that the grace is theirs together.
            process.terminate()
    limit = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for child in started:
        with suppress(psutil.Error):
            child.kill()


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """What a worker that still runs has started, directly or not."""
    if process.poll() is not None:
        return []
    with suppress(psutil.Error):
        return psutil.Process(process.pid).children(recursive=True)
    return []
