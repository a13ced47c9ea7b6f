"""Launching: the first cause is told in ten lines, and no process outlives the run."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from ridgeline.errors import (
    AbsentWorkerError,
    EngineError,
    LaunchError,
    NonFiniteError,
    PlanError,
    RidgelineError,
)
from ridgeline.runtime.training.launch import _own_signals, failure_of, launch
from ridgeline.workers import worker_process


def run(run_dir: Path, on_line: Callable[[bytes], None] | None = None, **acts: str) -> None:
    request = run_dir / "request.json"
    request.write_text(json.dumps({"else": "end", **{k.strip("r_"): v for k, v in acts.items()}}))
    launch("launch_worker", request, workers=2, threads=1, run_dir=run_dir, on_line=on_line)


def wait_for(*paths: Path) -> None:
    """Until the files exist; the test's own time limit ends a wait in vain."""
    event = threading.Event()
    while not all(path.exists() for path in paths):
        event.wait(0.01)


def test_workers_that_end_well(tmp_path: Path) -> None:
    """Output goes to the logs, progress to the caller, threads to the environment of the workers only."""
    lines: list[bytes] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    run(tmp_path, lines.append, r_0="tell")
    assert lines == [b"one", b"two"]
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "hello from 1, threads 1\n"
    assert before == {number: signal.getsignal(number) for number in before}


def test_killed_worker_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """After kill -9 of one worker the message names rank, signal, last span and log; its peers end."""

    def kill() -> None:
        wait_for(tmp_path / "running.0", tmp_path / "running.1")
        os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(LaunchError) as caught:
        run(tmp_path, r_0="train", r_1="train")
    killer.join()
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "wanted 2 workers to finish, got a death by signal 9 (SIGKILL, as the system does when memory runs "
        "out) in rank 1"
    )
    assert lines[1].startswith("  last seen: in all_reduce/0 of step 5, ")
    assert lines[2] == f"  log: {tmp_path / 'logs' / 'rank-1.log'}"
    assert lines[3] == "  last checkpoint: none; start again"
    assert len(lines) <= 10
    assert not psutil.pid_exists(int((tmp_path / "pid.0").read_text()))
    assert capfd.readouterr().err == ""


def test_crash_is_told_with_its_place(tmp_path: Path) -> None:
    """A crash in native code is told by its signal; the Python stack is in the log."""
    with pytest.raises(LaunchError) as caught:
        run(tmp_path, r_0="wait", r_1="segfault")
    assert "got a death by signal 11 (SIGSEGV) in rank 1\n  last seen: in forward of step 4" in str(
        caught.value
    )
    assert "Segmentation fault" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_exception_is_told_with_its_line(tmp_path: Path) -> None:
    """An unexpected exception is told in one line; its traceback is in the log."""
    with pytest.raises(LaunchError) as caught:
        run(tmp_path, r_0="wait", r_1="fail")
    assert re.match(
        r"wanted 2 workers to finish, got ValueError: the batch is odd \(at \S+launch_worker.py:\d+\) in "
        r"rank 1\n",
        str(caught.value),
    )
    assert "Traceback" in (tmp_path / "logs" / "rank-1.log").read_text()


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234")


def last_words(run_dir: Path, rank: int, error: Exception) -> None:
    """What a worker writes that ends with an error, without ending this process."""
    words = worker_process.LastWords(
        rank=rank,
        kind=type(error).__name__,
        message=str(error),
        place="file.py:1",
        is_ridgeline=isinstance(error, RidgelineError),
        time_ns=rank,
    )
    path = worker_process.last_words_path(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(words))


@pytest.mark.parametrize(
    ("codes", "errors", "wanted"),
    [
        ({0: 1, 1: -9}, {0: LOST}, "signal 9 (SIGKILL, as the system does when memory runs out) in rank 1"),
        ({0: 1, 1: 1}, {0: LOST, 1: ValueError("odd")}, "ValueError: odd (at file.py:1) in rank 1"),
        ({0: -15, 1: -35}, {}, "got a death by signal 35 (Real-time signal 1) in rank 1"),
        ({0: -15, 1: -32}, {}, "got a death by signal 32 (unknown) in rank 1"),
        ({0: -15, 1: -34}, {}, "got a death by signal 34 (SIGRTMIN) in rank 1"),
        ({0: -15, 1: -15, 2: 3}, {}, "exit status 3 in rank 2"),
        ({0: 1, 1: -15}, {0: LOST}, "RuntimeError: [gloo/transport/tcp/pair.cc:538] Connection closed"),
        ({0: 1, 1: 1}, {0: EngineError("Connection closed by peer"), 1: KeyError("x")}, "KeyError: 'x'"),
        ({0: 1, 1: 1}, {0: AbsentWorkerError("none from rank 1"), 1: KeyError("x")}, "KeyError: 'x'"),
        ({0: 1, 1: -15}, {0: AbsentWorkerError("none from rank 1")}, "none from rank 1"),
        ({0: 1}, {0: LOST, 2: PlanError("wanted a, got b")}, "wanted a, got b"),
    ],
)  # fmt: skip
def test_first_cause_is_found(
    tmp_path: Path, codes: dict[int, int], errors: dict[int, Exception], wanted: str
) -> None:
    """Deaths and own errors come before broken connections, and those before being ended by the agent."""
    for rank, error in errors.items():
        last_words(tmp_path, rank, error)
    assert wanted in str(failure_of(tmp_path, codes, 3))


def test_an_empty_black_box_hides_no_cause(tmp_path: Path) -> None:
    """As a full disk leaves it: what is known is told, and what is wrong with the box."""
    last_words(tmp_path, 1, OSError("No space left on device"))
    box = tmp_path / "blackbox" / "rank-1.bin"
    box.parent.mkdir()
    box.touch()
    wrong = f"wanted a black box of 64 bytes, got 0 bytes of something else in {box}; delete it"
    assert str(failure_of(tmp_path, {0: -15, 1: 1}, 2)).splitlines() == [
        "wanted 2 workers to finish, got OSError: No space left on device (at file.py:1) in rank 1",
        f"  last seen: unknown, {wrong}",
        f"  log: {tmp_path / 'logs' / 'rank-1.log'}",
        "  last checkpoint: none; start again",
    ]


def test_a_handler_that_python_did_not_install_becomes_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python knows no such handler, and so cannot put it back; those of Python are put back."""
    known = signal.getsignal
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number == signal.SIGHUP else known(number)
    )
    before = {number: known(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        with _own_signals():
            for number in before:
                signal.signal(number, lambda *_: None)
        assert known(signal.SIGHUP) == signal.SIG_DFL
        assert known(signal.SIGTERM) == before[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_own_errors_travel_as_themselves(tmp_path: Path) -> None:
    """A Ridgeline error of a worker is raised with its own class and message."""
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, r_0="wait", r_1="say no")
    assert str(caught.value) == "wanted finite loss, got NaN"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """A launcher that is killed or interrupted leaves no worker behind, and none says more than that."""
    (tmp_path / "request.json").write_text(json.dumps({"else": "load"}))
    program = (
        "import sys, pathlib\n"
        "from ridgeline.runtime.training.launch import launch\n"
        "d = pathlib.Path(sys.argv[1])\n"
        "launch('launch_worker', d / 'request.json', workers=2, threads=1, run_dir=d)\n"
    )
    environment = dict(
        os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path])
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], env=environment, stderr=subprocess.PIPE
    ) as launcher:
        wait_for(tmp_path / "running.0", tmp_path / "running.1")
        workers = [psutil.Process(int((tmp_path / f"pid.{r}").read_text())) for r in range(2)]
        launcher.send_signal(number)
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
        launcher.wait()
        assert launcher.stderr is not None
        said = launcher.stderr.read().decode()
    assert launcher.returncode != 0
    if number == signal.SIGINT:
        assert "KeyboardInterrupt: the workers were ended, continue with --resume" in said
        assert "death signal" not in said
        logs = [(tmp_path / "logs" / f"rank-{r}.log").read_text() for r in range(2)]
        assert logs == [f"hello from {r}, threads 1\n" for r in range(2)]
