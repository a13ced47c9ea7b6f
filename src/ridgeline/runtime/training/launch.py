"""Starting the workers of one host, and reporting what happened when one of them dies.

Processes are started and watched by torch's elastic agent, once and without restarts. When a worker
fails, the agent ends the others; the message built here names the first cause, not the broken
connections that follow from it.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ridgeline import errors, units
from ridgeline.errors import FileFormatError, LaunchError, RidgelineError
from ridgeline.execution import thread_variables
from ridgeline.host.signal_names import signal_name
from ridgeline.plan import Plan
from ridgeline.runtime.checkpoints import checkpoint_directory
from ridgeline.workers.blackbox import read_moment
from ridgeline.workers.worker_process import LOGS, LastWords, log_path, read_last_words

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.1
_LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "EngineError", "NCCL",
              "AbsentWorkerError", "DistBackendError", "DistNetworkError", "recvValue",
              "Timed out waiting")  # fmt: skip
"""Texts of errors that say no more than that another worker is gone.

Source: gloo's transport/tcp/pair.cc and torch's ProcessGroupNCCL and TCPStore, as seen in their messages.
"""
_MESSAGE_CHARACTERS = 2000


def launch(
    module: str,
    request: Path,
    *,
    workers: int,
    threads: int,
    run_dir: Path,
    on_line: Callable[[bytes], None] | None = None,
) -> None:
    """Run `python -m module REQUEST PARENT_PID` as `workers` processes and wait for all to end well.

    Must be called from the main thread, as the agent handles signals. An interrupt ends the workers and is
    raised as KeyboardInterrupt.

    Args:
        module: The workers' program; it calls `worker_process` first.
        request: A file that says what the workers do.
        workers: Processes to start on this host.
        threads: Torch threads per worker (OMP_NUM_THREADS); 0 leaves it as it is.
        run_dir: Gets the workers' logs, and holds black boxes and checkpoints.
        on_line: Called with each line that rank 0 appends to `logs/progress.jsonl`, in another thread.

    Raises:
        LaunchError: a worker was killed or failed; at most ten lines say which, why, and where it was.
        RidgelineError: a worker stopped with this error, whose message needs no more.
    """
    # Last words of an earlier start would be taken for the cause of a failure of this one.
    for stale in (run_dir / LOGS).glob("rank-*.error.json"):
        stale.unlink()
    for stale in (run_dir / "blackbox").glob("rank-*.bin"):
        stale.unlink()
    progress = run_dir / LOGS / "progress.jsonl"
    progress.parent.mkdir(parents=True, exist_ok=True)
    # Emptied, since its reader would take lines of an earlier start for new ones.
    progress.write_bytes(b"")
    with _Follower(progress, on_line), _quiet_agent(), _environment(threads), _own_signals():
        _run_agent(module, request, workers, run_dir)


def check_plan(plan: Plan, device: str | None = None) -> None:
    """Refuse a plan that this release cannot run, before anything is started.

    Args:
        plan: Its `workers` is the number of workers.
        device: `cpu` or `cuda`; None takes `cuda` where there is a GPU.

    Raises:
        PlanError: names the field, what it may be, and what to do.
    """
    import torch

    from ridgeline.runtime.steps.body.requirements import check_supported
    from ridgeline.workers.world import World

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_supported(plan, World(0, plan.workers, 0, torch.device(kind)))


def _run_agent(module: str, request: Path, workers: int, run_dir: Path) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        # Port 0: the system chooses a free one, so that runs side by side do not meet.
        rdzv_endpoint="127.0.0.1:0",
        # Else the agent looks up the name of the host, which not every network resolves.
        local_addr="127.0.0.1",
        # A restart would hide the first failure; from which checkpoint to go on is the user's to say.
        max_restarts=0,
        monitor_interval=_POLL_S,
        # The workers send their output to logs of their own (see worker_process).
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        # An interrupt is left to Python: the agent passes on what it handles, and workers that still import
        # modules would print where an interrupt found them. They are ended by SIGTERM.
        signals_to_handle=",".join(s.name for s in _SIGNALS if s != signal.SIGINT),
    )
    command = ("-P", "-u", "-m", module, str(request), str(os.getpid()))
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as failed:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        raise failure_of(run_dir, codes, workers) from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the workers were ended, continue with --resume") from None
    except SignalException as interrupted:
        raise LaunchError(
            f"wanted {units.counted(workers, 'worker')} to finish, got {interrupted.sigval.name} for the "
            "launcher; the workers were ended, continue with --resume"
        ) from None


def failure_of(run_dir: Path, codes: dict[int, int], workers: int) -> RidgelineError:
    """The error to raise for workers that ended badly: the first cause among them.

    Args:
        run_dir: Where their last words, logs, black boxes and checkpoints are.
        codes: Exit codes of the failed ranks; negative ones are signals.
        workers: Number of workers.
    """
    said = [read_last_words(run_dir, rank) for rank in range(workers)]
    words = {word.rank: word for word in said if word is not None}
    rank = min({*codes, *words}, key=lambda rank: _suspicion(codes.get(rank, 0), words.get(rank)))
    told = words.get(rank)
    if told is not None and told.is_ridgeline and told.kind != "EngineError":
        kind = getattr(errors, told.kind, RidgelineError)
        error: RidgelineError = kind(told.message)
        return error
    cause = _cause(codes.get(rank, 0), told)
    lines = [f"wanted {units.counted(workers, 'worker')} to finish, got {cause} in rank {rank}"]
    lines += _last_seen(run_dir / "blackbox" / f"rank-{rank}.bin")
    lines.append(f"  log: {log_path(run_dir, rank)}")
    last = checkpoint_directory.latest(run_dir / checkpoint_directory.NAME)
    if last is not None:
        lines.append(f"  last checkpoint: {last}; continue with --resume")
    else:
        lines.append("  last checkpoint: none; start again")
    return LaunchError("\n".join(lines))


def _last_seen(path: Path) -> list[str]:
    """The line on what a black box says; none where the worker wrote none."""
    try:
        moment = read_moment(path)
    except (FileFormatError, OSError) as error:
        # As a full disk leaves it; the cause of the failure is the news.
        return [f"  last seen: unknown, {error}"]
    if moment is None:
        return []
    where = f"in {moment.frame} of step {moment.step}" if moment.step >= 0 else "before step 1"
    ago = units.seconds(max(0.0, (time.time_ns() - moment.time_ns) * 1e-9))
    return [f"  last seen: {where}, {ago} ago"]


def _suspicion(code: int, told: LastWords | None) -> tuple[int, int]:
    """Sort key of causes: killed or crashed, then errors of its own, then lost peers, then ended ones."""
    if told is not None:
        text = f"{told.kind}: {told.message}"
        is_lost_peer = any(sign in text for sign in _LOST_PEER)
        # Lost connections follow from another worker's end, whoever notices first.
        return (2 if is_lost_peer else 1, told.time_ns)
    # SIGTERM is how the agent ends the others: the first cause is elsewhere.
    return (3 if -code in (signal.SIGTERM, 0) else 0, 0)


def _cause(code: int, told: LastWords | None) -> str:
    if told is not None:
        message = told.message[:_MESSAGE_CHARACTERS].splitlines()
        first = message[0] if message else ""
        return f"{told.kind}: {first} (at {told.place})"
    if code < 0:
        is_kill = -code == signal.SIGKILL
        why = "SIGKILL, as the system does when memory runs out" if is_kill else signal_name(-code)
        return f"a death by signal {-code} ({why})"
    return f"exit status {code}"


class _Follower:
    """Reads the lines of a growing file in a thread of its own, to the end of the `with` block."""

    def __init__(self, path: Path, on_line: Callable[[bytes], None] | None) -> None:
        self._path = path
        self._on_line = on_line
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ridgeline-progress", daemon=True)

    def __enter__(self) -> None:
        if self._on_line is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        assert self._on_line is not None
        with self._path.open("rb") as file:
            rest = b""
            while True:
                # Asked before reading, so that what was written before the end is read once more.
                is_last = self._is_over.wait(_POLL_S)
                *lines, rest = (rest + file.read()).split(b"\n")
                for line in lines:
                    self._on_line(line)
                if is_last:
                    return


@contextlib.contextmanager
def _environment(threads: int) -> Iterator[None]:
    """What the agent passes on to the workers; put back afterwards."""
    before = dict(os.environ)
    # The workers find the same modules as the caller; -P keeps the working directory out otherwise.
    os.environ["PYTHONPATH"] = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ.update(thread_variables(threads, os.environ))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers that the agent replaces."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: not installed from Python, which cannot install it again. The agent's own handler would
            # raise for a training that has ended.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Keep the agent's own report of a failure or signal off the terminal; ours replaces it."""
    # Imported first, since that sets the level of its logger.
    from torch.distributed.elastic.agent.server import api

    loggers = [logging.getLogger("torch.distributed.elastic"), api.logger]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
