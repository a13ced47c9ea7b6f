"""Groups of workers: what they get, how they fail, and that none survives."""

import contextlib
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from ridgeline.errors import LaunchError
from ridgeline.probe.groups import group
from ridgeline.probe.groups.group import Group, WorkerError, run_in_group
from ridgeline.probe.groups.worker_error import in_one_line
from warm import ADDRESS


@pytest.fixture(autouse=True)
def no_warm_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes themselves are what is tested here."""
    monkeypatch.delenv(ADDRESS)


@pytest.mark.parametrize("deadline_s", [300.0, math.inf])
def test_every_worker_is_placed_and_rank_0_replies(deadline_s: float) -> None:
    """Workers get their ranks, one gloo group, the threads asked for, and the request as it is."""
    reply = run_in_group(
        "probe_targets:describe",
        b'{"a": 1}',
        workers=2,
        threads=1,
        device="cpu",
        deadline_s=deadline_s,
    )
    content = json.loads(reply)
    assert content["request"] == {"a": 1}
    assert [worker["rank"] for worker in content["workers"]] == [0, 1]
    assert content["workers"][1]["environment"] == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
    }
    assert [worker["threads"] for worker in content["workers"]] == [1, 1]
    assert content["workers"][0]["backend"] == "gloo"
    assert not any(psutil.pid_exists(worker["pid"]) for worker in content["workers"])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_group_that_was_started_ahead_serves_the_call_that_it_fits(workers: int) -> None:
    """With variables that it is told then; another is ended, and a fresh one serves. None is left."""
    before = psutil.Process().children()  # those of torch's compiler, say, which stay
    with Group("probe_targets:describe", workers=1, threads=1, device="cpu") as group:
        (waiting,) = [child for child in psutil.Process().children() if child not in before]
        reply = run_in_group(
            "probe_targets:describe",
            b"{}",
            workers=workers,
            threads=1,
            device="cpu",
            environment={"LOCAL_RANK": "5"},
            group=group,
        )
        told = json.loads(reply)["workers"]
        assert [worker["pid"] == waiting.pid for worker in told] == [workers == 1, False][:workers]
        assert told[0]["environment"]["LOCAL_RANK"] == "5"
        assert not waiting.is_running()


def test_a_group_that_nobody_calls_is_ended() -> None:
    """While it starts, or while it waits."""
    before = psutil.Process().children()
    with Group("probe_targets:describe", workers=2, threads=1, device="cpu"):
        waiting = [child for child in psutil.Process().children() if child not in before]
    assert len(waiting) == 2
    assert not any(process.is_running() for process in waiting)


def test_workers_that_started_are_ended_where_another_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody has the group then to end it."""
    started: list[subprocess.Popen[bytes]] = []
    start = group._started

    def refused(*arguments: Any) -> "subprocess.Popen[bytes]":
        if started:
            raise OSError(11, "Resource temporarily unavailable")
        started.append(start(*arguments))
        return started[0]

    monkeypatch.setattr(group, "_started", refused)
    with pytest.raises(OSError, match="temporarily unavailable"):
        Group("probe_targets:describe", workers=2, threads=1, device="cpu")
    assert started[0].returncode is not None


def test_what_precedes_the_command_of_a_worker() -> None:
    """Is its own, and runs in its process."""
    prefixes = [("env", f"LOCAL_RANK={7 + rank}") for rank in range(2)]
    reply = run_in_group(
        "probe_targets:describe", b"{}", workers=2, threads=1, device="cpu", prefixes=prefixes
    )
    told = [worker["environment"]["LOCAL_RANK"] for worker in json.loads(reply)["workers"]]
    assert told == ["7", "8"]


def test_worker_that_raises_is_named_with_its_last_words() -> None:
    """The message names the rank that failed first, not the peers that lost it, and its traceback."""
    with pytest.raises(WorkerError) as caught:
        run_in_group("probe_targets:fail_on_rank_1", b"", workers=2, threads=1, device="cpu")
    text = str(caught.value)
    assert caught.value.last_line == "ValueError: the batch is odd"
    assert caught.value.raised[1:] == ("ValueError", "the batch is odd")
    assert not caught.value.is_late
    assert text.startswith(
        "wanted 2 workers to finish probe_targets:fail_on_rank_1, got exit code 1 from rank 1 of 2; "
        "its last output:\n"
    )
    assert "ValueError: the batch is odd" in text
    assert text.endswith("correct the error above, or try with one worker")
    assert in_one_line(caught.value) == (
        "wanted 2 workers to finish probe_targets:fail_on_rank_1, got exit code 1 from rank 1 of 2: "
        "ValueError: the batch is odd"
    )


def test_worker_that_is_killed_is_named_with_its_signal() -> None:
    """A worker killed from outside is told by signal, with the likely reason."""
    with pytest.raises(LaunchError) as caught:
        run_in_group("probe_targets:kill_rank_1", b"", workers=2, threads=1, device="cpu")
    text = str(caught.value)
    assert "got signal 9 (SIGKILL) from rank 1 of 2" in text
    assert isinstance(caught.value, WorkerError)
    assert not caught.value.raised.kind
    assert text.endswith("the system may be out of memory; use fewer workers or a smaller batch")


def test_worker_without_reply_is_an_error() -> None:
    """Rank 0 that leaves the interpreter early is not taken for one that has nothing to say."""
    with pytest.raises(LaunchError, match="got none although all 1 workers ended well"):
        run_in_group("probe_targets:leave", b"", workers=1, threads=1, device="cpu")


def test_deadline_ends_the_group(tmp_path: Path) -> None:
    """A group past its deadline is ended, and the message shows how far it came."""
    pid_file = tmp_path / "pid"
    request = json.dumps({"pid_file": str(pid_file)}).encode()
    with pytest.raises(WorkerError) as caught:
        run_in_group(
            "probe_targets:hang", request, workers=1, threads=1, device="cpu", deadline_s=1.5
        )
    assert caught.value.is_late
    assert "within 1.50 s, got no end from rank 0 of 1; its last output:" in str(caught.value)
    assert not pid_file.exists() or _ends(int(pid_file.read_text()))


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    """A compiler that hangs would keep a core busy for as long as it likes."""
    pid_file = tmp_path / "pid"
    request = json.dumps({"pid_file": str(pid_file)}).encode()
    with pytest.raises(WorkerError, match="wanted progress in probe_targets:hang_in_child"):
        run_in_group(
            "probe_targets:hang_in_child",
            request,
            workers=1,
            threads=1,
            device="cpu",
            hanging=lambda: 0 if pid_file.exists() else None,
        )
    assert _ends(int(pid_file.read_text()))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """A parent that gets SIGKILL leaves no orphan behind."""
    pid_file = tmp_path / "pid"
    script = textwrap.dedent(
        f"""
        import json, sys
        sys.path.append({str(Path(__file__).parent)!r})
        from ridgeline.probe.groups.group import run_in_group
        request = json.dumps({{"pid_file": {str(pid_file)!r}}}).encode()
        run_in_group("probe_targets:hang", request, workers=1, threads=1, device="cpu")
        """
    )
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        worker = _worker_of(parent)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    psutil.wait_procs([worker], timeout=60)
    assert not worker.is_running()


def _ends(pid: int) -> bool:
    """Whether a process ends soon, or is there only because nobody collects it."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended, _, _ = select.select([process], [], [], 60.0)
    finally:
        os.close(process)
    return bool(ended)


def _worker_of(parent: subprocess.Popen[bytes]) -> psutil.Process:
    """The worker that a parent process has started, once it has."""
    while parent.poll() is None:
        for child in psutil.Process(parent.pid).children():
            with contextlib.suppress(
                psutil.NoSuchProcess
            ):  # what is asked for a moment: ldconfig, uname
                # A child that has begun nothing yet has the words of its parent, which name the function.
                if "ridgeline.probe.groups.group_worker" in child.cmdline():
                    return child
    raise AssertionError("the parent ended before it had a worker")


@pytest.mark.parametrize(
    ("workers", "device", "target"),
    [(0, "cpu", "a:b"), (1, "tpu", "a:b"), (1, "cpu", "a.b")],
)
def test_wrong_arguments_are_refused(workers: int, device: str, target: str) -> None:
    """Nothing is started for arguments that cannot work."""
    message = (
        "wanted workers >= 1, device cpu or cuda and a target module:function, got "
        f"workers={workers}, device={device!r}, target={target!r} in run_in_group; correct them"
    )
    with pytest.raises(LaunchError, match=re.escape(message)):
        run_in_group(target, b"", workers=workers, threads=1, device=device)


def test_rank_0_may_work_for_longer_than_a_collective_may_take() -> None:
    """It says meanwhile that it does, and none of those that wait takes it for lost."""
    target = "probe_targets:waiting_for_rank_0"
    reply = run_in_group(target, b"", workers=2, threads=1, device="cpu")
    assert json.loads(reply) == [[1.0], [-1.0]]
