"""Graphs are gone before their process group is, however a script ends; and no end waits for lost peers."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.errors import PlanError
from ridgeline.workers import leaving
from ridgeline.workers.world import World

SCRIPT = Path(__file__).parent / "ending_cases.py"
GONE = (
    "PlanError: wanted an open process group of 2 workers, got one that was destroyed (rank {}); train and "
    "choose before destroy_process_group(), or join a group and make a new TrainStep"
)
BOUNDED = ["within bounds", "closed at once", "aborted group"]
WAITED = ["capture", "synchronize", "close"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all scripts, two workers each, left what they did."""
    folder = tmp_path_factory.mktemp("ends")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "errors").write_text(done.stderr)
    return folder


def ends_told(path: Path) -> list[str]:
    """What a worker did, without its steps and without waits for which nothing was then closed."""
    told = [line for line in path.read_text().splitlines() if line not in ("eager", "replay")]
    following = [*told[1:], ""]
    pairs = zip(told, following, strict=True)
    return [line for line, after in pairs if line != "synchronize" or after == "close"]


@pytest.mark.parametrize(
    ("script", "status", "start"),
    [
        ("destroys", 0, [*WAITED, "group ends"]),
        ("destroys_by_the_function_imported_before", 0, [*WAITED, "group ends"]),
        ("just_ends", 0, [*WAITED]),
        ("just_ends_in_a_group_of_its_own", 0, ["capture", "close"]),
        ("destroys_at_exit", 0, ["capture"]),
        ("destroys_and_joins_again", 0, [*WAITED, "group ends", *WAITED]),
        ("destroys_a_part", 0, ["capture", "group ends", *WAITED[1:]]),
        ("raises_in_one", 1, [*WAITED]),
        ("raises_in_one_and_destroys", 1, ["capture", "close", "group ends"]),
        ("exits_in_one", 3, [*WAITED]),
        ("interrupted_in_one", None, [*WAITED]),
    ],
)
def test_graphs_are_closed_before_their_group_ends(
    folder: Path, script: str, status: int | None, start: list[str]
) -> None:
    """Whoever destroys the group, by whatever name, or lets the interpreter end: no graph outlives it.

    An end of the whole group that the script did not ask for is not waited for where one worker failed. An
    interrupted script ends as one without a step does.
    """
    ends = json.loads((folder / "ends.json").read_text())
    if status is None:
        status = ends["interrupted_without_a_step"][1]
        assert status in (-2, 1)
    assert ends[script] == [0 if status == 0 else 1, status], (folder / "errors").read_text()
    for rank in range(2):
        told = ends_told(folder / f"{script}.{rank}")
        assert told[: len(start)] == start
        assert told.count("close") == told.count("capture")
        if script not in ("destroys_a_part", "just_ends_in_a_group_of_its_own"):
            last = len(told) - told[::-1].index("close")
            assert told[last:].count("group ends") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_without_its_group_says_so(folder: Path, rank: int) -> None:
    """After `destroy_process_group` a step is refused by name, and can still be closed."""
    done = (folder / f"destroys.{rank}").read_text().splitlines()
    assert GONE.format(rank) in done


def test_what_a_step_had_sent_when_it_raised_is_no_error_of_its_own(folder: Path) -> None:
    """A script need not close a step: behind its own error there is none that asks for `close()`."""
    errors = (folder / "errors").read_text()
    assert "RuntimeError: invalid shape dimension -2" in errors
    assert "closed before the interpreter ends" not in errors
    assert json.loads((folder / "ends.json").read_text())["raises_in_backward"] == [0, 1]


def test_a_worker_alone_needs_no_group() -> None:
    """What a destroyed group means to several workers means nothing to one."""
    World(0, 1, 0, torch.device("cpu")).check_open()
    with pytest.raises(PlanError, match="wanted an open process group of 3 workers"):
        World(0, 3, 0, torch.device("cpu")).check_open()


class Graph:
    """Holds a communicator; tells how it was closed."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def close(self, *, wait: bool = True) -> None:
        self.log.append("closed" if wait else "closed at once")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to a group over NCCL, of stand-ins, that was made here and holds a graph."""
    done: list[str] = []
    monkeypatch.setattr(leaving, "_to_close", {Graph(done)})
    monkeypatch.setattr(leaving, "_abandoned", [])
    monkeypatch.setattr(leaving, "_own_groups", [dist.group.WORLD])
    monkeypatch.setattr(leaving, "_on_nccl", lambda: True)
    monkeypatch.setattr(leaving, "is_open", lambda: not done or not done[-1].endswith("ed group"))
    monkeypatch.setattr(leaving, "_all_end", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed group"))
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: done.append("aborted group")
    )
    monkeypatch.delattr(sys, "last_value", raising=False)

    @contextlib.contextmanager
    def bounded(seconds: int) -> Iterator[None]:
        assert seconds == leaving.ABORT_S
        done.append("within bounds")
        yield

    monkeypatch.setattr(leaving, "_deadline", bounded)
    return done


def test_an_end_of_all_is_waited_for(log: list[str]) -> None:
    """Where no error was seen and all workers are at their end, the group is destroyed."""
    leaving._at_exit()
    assert log == ["closed", "destroyed group"]


def test_an_uncaught_error_aborts(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker that raised leaves behind would wait for its peers, and they for it."""
    monkeypatch.setattr(sys, "last_value", ValueError("of no matter"), raising=False)
    leaving._at_exit()
    assert log == BOUNDED


def test_an_end_alone_aborts(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends while others go on does not wait for them, nor does its status change."""
    monkeypatch.setattr(leaving, "_all_end", lambda: False)
    leaving._at_exit()
    assert log == ["closed at once", "aborted group"]


def test_a_group_that_was_there_is_left_to_its_maker(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the graphs go: a script's own end of its group may still come."""
    monkeypatch.setattr(leaving, "_own_groups", [])
    leaving._at_exit()
    assert log == ["closed at once"]


def test_what_is_destroyed_while_an_error_is_handled_is_aborted(log: list[str]) -> None:
    """`finally: destroy_process_group()`: torch finds no group left to wait for."""
    try:
        raise ValueError("of no matter")
    except ValueError:
        leaving._before_destroying.finalize()
    assert log == BOUNDED


@pytest.mark.parametrize("code", [None, 0])
def test_a_good_exit_is_no_failure(log: list[str], code: int | None) -> None:
    """`sys.exit(0)` through a `finally` that leaves the group ends it as any good end does."""
    try:
        sys.exit(code)
    except SystemExit:
        leaving.leave()
    assert log == ["closed", "destroyed group"]


def test_after_a_failed_capture_the_group_is_aborted(log: list[str]) -> None:
    """The device refuses all work then, so nothing comes to an end that could be waited for."""
    leaving.abandon("of no matter")
    leaving.leave()
    assert log == BOUNDED


def test_workers_meet_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two is not followed in time, the second finds the first there; without a store, none."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    monkeypatch.setattr(leaving, "GATHER_S", 0.0)
    monkeypatch.setattr(dist, "get_world_size", lambda **_: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert not leaving._all_end()
    assert leaving._all_end()

    class Lost:
        def add(self, key: str, amount: int) -> Any:
            raise dist.DistNetworkError("connection reset by peer")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Lost)
    assert not leaving._all_end()


def test_an_abort_that_does_not_come_back_ends_the_process() -> None:
    """With status 1 and the place where it was, also where no thread can be started any more."""
    program = (
        "import atexit, threading\n"
        "from ridgeline.workers.leaving import _deadline\n"
        "def stuck():\n"
        "    with _deadline(1):\n"
        "        threading.Event().wait()\n"
        "atexit.register(stuck)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "in stuck" in done.stderr
