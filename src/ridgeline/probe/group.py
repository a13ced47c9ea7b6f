"""Run a function in a group of worker processes on this host, and bring home the reply of rank 0.

Workers are fresh interpreters (`python -m ridgeline.probe.group`), so the caller's threads, heap,
random state and `__main__` stay out of it. Each joins a process group over gloo or NCCL before the
function is called. A worker whose parent dies ends itself: its standard input is a pipe that the
parent never writes to, and end of file there means that the parent is gone.
"""

import importlib
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import psutil

from ridgeline.errors import LaunchError
from ridgeline.execution import thread_variables
from ridgeline.probe.worker_error import Raised, failure, lateness, standstill
from ridgeline.probe.worker_error import WorkerError as WorkerError

GRACE_S = 3.0
"""How long a worker may take to end after SIGTERM before it gets SIGKILL."""
SETTLE_S = 0.5
"""How long peers of a failed worker may take to fail too, so that the first one can be told."""
_POLL_S = 0.02
_LOOK_S = 0.5
WAITING_S = 300.0
"""A collective of a group without a deadline waits no longer than this for the other workers."""


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
        hanging: Asked about once a second for a rank that makes no progress; then the group is ended.
        prefixes: What precedes the command of each worker, by rank, and runs it in its own process, e.g. in
            another network namespace; empty for nothing.

    Raises:
        WorkerError: a worker failed, was killed or hangs, or the deadline passed. All others are ended first.
        LaunchError: the arguments are wrong, or rank 0 left no reply.

    Cost: Starts interpreters and imports torch in each: about 2 s.
    """
    if workers < 1 or device not in ("cpu", "cuda") or target.count(":") != 1:
        raise LaunchError(
            "wanted workers >= 1, device cpu or cuda and a target module:function, got "
            f"workers={workers}, device={device!r}, target={target!r} in run_in_group; correct them"
        )
    with tempfile.TemporaryDirectory(prefix="ridgeline-group-") as name, ExitStack() as stack:
        directory = Path(name)
        (directory / "request").write_bytes(request)
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for rank in range(workers):
            log = stack.enter_context((directory / f"output.{rank}").open("wb"))
            command = [name, target, device, str(first_gpu)]
            variables = _environment(rank, workers, threads, deadline_s) | dict(environment or {})
            prefix = prefixes[rank] if prefixes else ()
            processes.append(_started(prefix, command, variables, log))
        _wait(processes, directory, target, deadline_s, hanging or (lambda: None))
        reply = directory / "reply"
        if not reply.exists():
            raise LaunchError(
                f"wanted a reply of rank 0 from {target}, got none although all {workers} workers "
                "ended well; the function must return bytes instead of leaving the interpreter"
            )
        return reply.read_bytes()


def _started(
    prefix: Sequence[str], arguments: list[str], environment: dict[str, str], log: BinaryIO
) -> "subprocess.Popen[bytes]":
    """A worker process; its standard input is its lifeline."""
    return subprocess.Popen(
        [*prefix, sys.executable, "-P", "-u", "-m", "ridgeline.probe.group", *arguments],
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
    for name in (
        "MASTER_PORT",
        "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        environment.pop(name, None)
    return environment


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
            failed = _settle(processes)
            _end(processes)
            raise failure(target, len(processes), failed, directory)
        if all(code == 0 for code in codes):
            return
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
    started = [child for process in processes for child in _descendants(process)]
    for process in processes:
        if process.stdin is not None:
            process.stdin.close()  # the worker's lifeline
        if process.poll() is None:
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


def _follow_parent() -> None:
    """End this worker at once when the parent is gone."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="ridgeline-lifeline", daemon=True).start()


def _work(directory: Path, target: str, device: str, first_gpu: int) -> None:
    """Join the group, call the target, and write the reply if this is rank 0."""
    import torch
    import torch.distributed as dist

    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    if threads:
        torch.set_num_threads(threads)
    deadline_s = float(os.environ["RIDGELINE_GROUP_DEADLINE_S"])
    place = None
    if device == "cuda":
        if first_gpu + rank >= torch.cuda.device_count():
            raise LaunchError(
                f"wanted one GPU per worker, got {torch.cuda.device_count()} GPUs for rank {rank}; "
                f"start at most {torch.cuda.device_count()} workers on this host"
            )
        place = torch.device("cuda", first_gpu + rank)
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        # A file needs no free port, so groups started at the same time cannot collide.
        store=dist.FileStore(str(directory / "store"), workers),
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=deadline_s if math.isfinite(deadline_s) else WAITING_S),
        device_id=place,
    )
    module, _, name = target.partition(":")
    function: Callable[[bytes], bytes] = getattr(importlib.import_module(module), name)
    reply = function((directory / "request").read_bytes())
    if rank == 0:
        (directory / "reply").write_bytes(reply)
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Entry of a worker process: directory, target, device and the GPU of rank 0."""
    _follow_parent()
    directory, target, device = Path(arguments[0]), arguments[1], arguments[2]
    is_done = False
    try:
        _work(directory, target, device, int(arguments[3]))
        is_done = True
    finally:
        if not is_done:  # note when, so that the parent can tell who failed first
            error = sys.exception()
            raised = Raised(time.monotonic_ns(), type(error).__name__, str(error))
            raised.save(directory, int(os.environ["RANK"]))
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # The ordinary exit would wait for collectives that a dead peer never joins; and after success
        # it was once seen to abort ("terminate called without an active exception"), most likely over a
        # thread of torch that was still ending. Everything of value is in files by now.
        os._exit(0 if is_done else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
