"""A worker that does not come is named: which, how far it is, what was waited for, and what to do."""

import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ports import free_port
from ridgeline.errors import AbsentWorkerError, EngineError, UnansweredError
from ridgeline.host import bounded
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.workers import attendance, telling
from ridgeline.workers.attendance import Attendance
from warm import WARM

SCRIPT = Path(__file__).parent / "absent_workers.py"
BATCHES = "Give every worker as many batches (a DistributedSampler, drop_last=True, or a common number of steps)"
RUNS = "it runs (process PID on HOST), "
LOOK = ", or see what it does: py-spy dump --pid PID"
WANTED = {
    "ends_early": (
        f"wanted all 2 workers in all_reduce/0 of step 4, got none from rank 1: {RUNS}between two steps. "
        f"Completed: 3 steps on ranks 0 and 1. {BATCHES}{LOOK}"
    ),
    "ends_a_round_early": (
        f"wanted all 2 workers in all_reduce/0 of step 6, got none from rank 1: {RUNS}between two steps. "
        f"Completed: 5 steps on rank 0; 4 steps on rank 1. {BATCHES}{LOOK}"
    ),
    "misses_what_travels": (
        f"wanted all 2 workers in all_reduce/0 of step 5, got none from rank 1: {RUNS}between two steps. "
        f"Completed: 4 steps on rank 0; 3 steps on rank 1. {BATCHES}{LOOK}"
    ),
    "closes_early": (
        f"wanted all 2 workers in all_reduce/0 of step 4, got none from rank 1: {RUNS}after closing its "
        f"TrainStep 'step'. Completed: 3 steps on ranks 0 and 1. {BATCHES}{LOOK}"
    ),
    "raises": (
        "wanted all 2 workers in all_reduce/0 of step 3, got none from rank 1: it raised ValueError: boom. "
        "Completed: 2 steps on ranks 0 and 1. See the traceback of rank 1"
    ),
    "skips": (
        f"wanted all 2 workers in all_reduce/0 of step 5, got none from rank 1: {RUNS}between two steps. "
        f"Completed: 4 steps on ranks 0 and 1. {BATCHES}{LOOK}"
    ),
    "saves_alone": (
        "wanted all 2 workers in an exchange between all workers of optimizer_state(), got none from rank 1: "
        f"{RUNS}in step 4, wait. Completed: 3 steps on ranks 0 and 1. Make the same calls in the same order "
        "on all workers: this one is in optimizer_state()"
    ),
    "reports_alone": (
        f"wanted all 2 workers in step.verdict(), got none from rank 1: {RUNS}between two steps. Completed: "
        "3 steps on ranks 0 and 1. Call step.verdict() on all workers, and print what it gives on one"
    ),
    "makes_one_alone": (
        f"wanted all 2 workers in TrainStep(...), got none from rank 1: {RUNS}in step 2, wait. Completed: 1 "
        "step on ranks 0 and 1. Make the same steps on all workers"
    ),
    "hangs": (
        f"wanted all 2 workers in all_reduce/0 of step 3, got none from rank 1: {RUNS}in step 3, forward. "
        "Completed: 2 steps on ranks 0 and 1. See where it hangs: py-spy dump --pid PID"
    ),
    "two_steps": (
        f"wanted all 2 workers in all_reduce/0 of step 4 of 'generator', got none from rank 1: {RUNS}between "
        "two steps. Completed: 3 steps of 'generator', 3 steps of 'discriminator' on ranks 0 and 1. "
        f"{BATCHES}{LOOK}"
    ),
    "chooses_alone": (
        f"wanted all 2 workers in the choice of a plan, got none from rank 1: {RUNS}before its first step. "
        "Completed: no step on ranks 0 and 1. Make the same steps on all workers"
    ),
    "one_chooses": (
        "wanted all workers in one exchange, that of TrainStep(...), got others in that of something "
        "else; make the same calls in the same order on all workers: plan='auto' and optimizer_state() on all "
        "of them, or on none"
    ),
    "starts_a_server_late": (
        "wanted all 2 workers in an exchange through the store of the job of the start of servers, got none "
        f"from rank 1: {RUNS}in the start of servers. Completed: 0 steps on ranks 0 and 1. See where it "
        "hangs: py-spy dump --pid PID"
    ),
    "trains_alone": (
        "wanted all 2 workers in TrainStep(...), got none from rank 1: it made no TrainStep. Completed: no step on rank 0. Make the same steps on all workers"
    ),
    "pushes_less": (
        f"wanted all 2 workers in a push to a store, got none from rank 1: {RUNS}before its first step. "
        f"Completed: no step on ranks 0 and 1. {BATCHES}, or see what it does: py-spy dump --pid PID"
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What rank 0 was told in each case; rank 1 ends by a signal in the last."""
    output = tmp_path_factory.mktemp("absent") / "told.json"
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_CACHE_HOME": str(output.parent),
    }
    workers = [
        subprocess.Popen(
            WARM.command(SCRIPT, output, environment=environment),
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, -9], "\n".join(errors)[-3000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize("case", WANTED)
def test_the_worker_that_does_not_come_is_named(told: dict[str, str], case: str) -> None:
    """With the steps that each has completed, what is waited for, and what to do."""
    text = re.sub(r"process \d+ on [^);]+", "process PID on HOST", told[case])
    assert re.sub(r"--pid \d+", "--pid PID", text) == WANTED[case]


def test_a_killed_worker_is_named(told: dict[str, str]) -> None:
    """How far it was is known from its last word."""
    assert re.fullmatch(
        r"wanted all 2 workers in (all_reduce/0|broadcast_buffers) of step 3, got none from rank 1: its "
        r"process is gone \(process \d+ on .+; last heard .+\)\. Completed: 2 steps on rank 0; at least "
        r"(\d steps?|no step) on rank 1\. See its log, its exit status, and whether .+ ran out of memory",
        told["is_killed"],
    )


@pytest.fixture
def both() -> Iterator[tuple[Attendance, Attendance]]:
    """Two workers in one process, each after its first step."""
    store = dist.HashStore()
    workers = Attendance(store, 0, range(2)), Attendance(store, 1, range(2))
    for worker in workers:
        name = worker.enroll("step")
        worker.begin_step(name, Recorder(HostClock()))
        worker.end_step(name)
        worker.publish()
    yield workers
    for worker in workers:
        worker.close()


def test_no_progress_is_told_before_anything_fails(
    both: tuple[Attendance, Attendance], capsys: pytest.CaptureFixture[str]
) -> None:
    """By a worker that waits, as collectives on GPUs never raise; by nobody while all are as far."""
    mine, other = both
    mine._tell_of_absent(30.0)
    assert capsys.readouterr().err == ""
    mine.begin_step("step", Recorder(HostClock()))
    mine.publish()
    other.publish()
    other._tell_of_absent(30.0)
    assert capsys.readouterr().err == ""
    mine._tell_of_absent(30.0)
    text = re.sub(r"process \d+ on [^);]+", "process PID on HOST", capsys.readouterr().err)
    assert re.sub(r"--pid \d+", "--pid PID", text) == (
        "ridgeline: no progress for 30.0 s: wanted all 2 workers in step 2, got none from rank 1: "
        f"{RUNS}between two steps. Completed: 1 step on ranks 0 and 1. {BATCHES}{LOOK}\n"
    )


def test_who_closed_its_step_is_told_at_once(
    both: tuple[Attendance, Attendance], capsys: pytest.CaptureFixture[str]
) -> None:
    """Who is only behind is not: it may be slow. Nor is anybody who makes the next step later."""
    mine, other = both
    mine.begin_step("step", Recorder(HostClock()))
    assert not mine._tell_of_absent(telling.SURE_AFTER_S)
    other.closed("step")
    other.publish()
    with mine.phase("TrainStep(...)"):
        assert not mine._tell_of_absent(telling.SURE_AFTER_S)
    assert capsys.readouterr().err == ""
    assert mine._tell_of_absent(telling.SURE_AFTER_S)
    assert "it runs (process" in (said := capsys.readouterr().err)
    assert "after closing its TrainStep 'step'. Completed: 1 step on ranks 0 and 1" in said


def test_who_trained_to_its_end_is_not_missed(
    both: tuple[Attendance, Attendance],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first worker evaluates alone, say, when the others have left."""
    mine, other = both
    other.close()
    assert not mine._tell_of_absent(60.0)
    monkeypatch.setattr(telling, "is_gone", lambda row: True)
    assert not mine._tell_of_absent(60.0)
    assert capsys.readouterr().err == ""
    mine.begin_step("step", Recorder(HostClock()))
    assert mine._tell_of_absent(telling.SURE_AFTER_S)
    assert "none from rank 1: its process is gone" in capsys.readouterr().err
    mine.closed("step")
    assert not mine._tell_of_absent(60.0)


def test_looks_at_the_others_become_rare() -> None:
    """From a worker's last progress on; what is sure is not said again before all else is."""
    looks = telling.Looks()
    assert not looks.look((1, 0), 100.0)
    times = [100.5 + 0.5 * number for number in range(300)]
    assert [t - 100.0 for t in times if looks.look((1, 0), t)] == [2, 4, 8, 16, 30, 60, 120]
    assert not looks.look((1, 1), 300.0)
    assert looks.look((1, 1), 302.0) == 2.0
    looks.has_told()
    assert not looks.look((1, 1), 329.5)
    assert looks.look((1, 1), 330.0) == 30.0


def test_other_errors_stay_what_they_are(both: tuple[Attendance, Attendance]) -> None:
    """Those that no collective raised, and those of a collective to which all came."""
    mine, other = both
    with pytest.raises(RuntimeError, match="out of memory"), mine.meeting("a sum"):
        raise RuntimeError("out of memory")
    other.call()
    other.call()
    with pytest.raises(RuntimeError, match="gloo"), mine.meeting("a sum"):
        raise RuntimeError("gloo/transport: unreachable")


def test_a_host_that_stood_still_has_not_waited(
    both: tuple[Attendance, Attendance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock went on, and the others could say no more than it could look."""
    mine, other = both
    other.call()
    other.call()
    now = SimpleNamespace(s=0.0)

    def sleep(_: float) -> None:
        if now.s:
            other.publish()
        now.s = 60.0

    monkeypatch.setattr(bounded, "time", SimpleNamespace(monotonic=lambda: now.s))
    monkeypatch.setattr(attendance.time, "sleep", sleep)
    with pytest.raises(RuntimeError, match="gloo"), mine.meeting("a sum"):
        raise RuntimeError("gloo/transport: unreachable")


def test_whom_a_server_waits_for_is_told_of(both: tuple[Attendance, Attendance]) -> None:
    """Workers of a store may be steps apart, so their places say nothing: its server names them, or none."""
    mine, other = both
    other.begin_step("step", Recorder(HostClock()))
    other.call()
    with (
        pytest.raises(
            AbsentWorkerError, match="in a push of step 2, got none from rank 1: it runs"
        ),
        mine.meeting("a push"),
    ):
        raise EngineError("in a task") from UnansweredError("got none of worker 1", (1,))
    mine.begin_step("step", Recorder(HostClock()))
    mine.call()
    with pytest.raises(UnansweredError, match=r"^got no answer$"), mine.meeting("a push"):
        raise UnansweredError("got no answer")
    other.stopped(ValueError("boom"))
    with (
        pytest.raises(AbsentWorkerError, match="got none from rank 1: it raised ValueError: boom"),
        mine.meeting("a push"),
    ):
        raise UnansweredError("got no answer")


def test_a_collective_behind_the_one_that_timed_out_tells_of_the_absent(
    both: tuple[Attendance, Attendance],
) -> None:
    """Its error has other words than the first one's, and not the name of gloo."""
    mine, _ = both
    mine.begin_step("step", Recorder(HostClock()))
    with (
        pytest.raises(AbsentWorkerError, match="got none from rank 1: it runs"),
        mine.meeting("a sum"),
    ):
        raise RuntimeError("Application timeout caused pair closure")


@pytest.mark.parametrize("is_seen_to_leave", [True, False])
def test_who_gave_up_is_told_by_those_that_come_later(
    is_seen_to_leave: bool, both: tuple[Attendance, Attendance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections close before it says that it leaves, which is waited for; a launcher may end it before."""
    mine, other = both
    other.call()
    other._lost_in = "before its first step"
    other.publish()
    if is_seen_to_leave:
        monkeypatch.setattr(attendance.time, "sleep", lambda seconds: other.close())
    else:
        monkeypatch.setattr(telling, "is_gone", lambda row: row.rank == 1)
    with (
        pytest.raises(AbsentWorkerError, match="rank 1: it had waited for other workers until"),
        mine.meeting("a sum"),
    ):
        raise RuntimeError("gloo/transport: Connection closed by peer")


def test_closing_a_step_does_not_hide_where_others_were_lost(
    both: tuple[Attendance, Attendance],
) -> None:
    """Who comes later must learn that it was elsewhere; the next step is another place."""
    mine, _ = both
    mine.begin_step("step", Recorder(HostClock()))
    with pytest.raises(AbsentWorkerError), mine.meeting("a sum"):
        raise RuntimeError("gloo/transport: Connection closed by peer")
    mine.closed("step")
    assert mine.row().doing == "in step 2"
    assert mine.row().is_waiting
    mine.begin_step("step", Recorder(HostClock()))
    assert not mine.row().is_waiting


class Watched(Attendance):
    """Keeps what its thread would write whenever its count of rounds changes."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_rounds":
            vars(self).setdefault("words", []).append(self.row())


def test_who_raised_is_never_only_behind(both: tuple[Attendance, Attendance]) -> None:
    """Its thread may write a word at any moment: others would take it for one that is still to come."""
    worker, _ = both
    worker.__class__ = Watched
    worker.begin_step("step", Recorder(HostClock()))
    worker.stopped(ValueError("odd"))
    begun, *later = vars(worker)["words"]
    assert [(row.rounds, row.end) for row in later] == [
        (begun.rounds - 1, "it raised ValueError: odd")
    ]


def test_steps_of_one_name_are_counted_apart(both: tuple[Attendance, Attendance]) -> None:
    mine, _ = both
    assert [mine.enroll("step"), mine.enroll("step"), mine.enroll("other")] == [
        "step (2)",
        "step (3)",
        "other",
    ]
    with mine.phase("the choice of a plan"):
        assert mine.enroll("step") == ""


@pytest.mark.parametrize("wait", [True, False])
def test_closing_waits_for_a_word_on_its_way(monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    """The thread is not left inside of the store, where the end of the interpreter would abort the process."""
    is_writing, may_end, waited = threading.Event(), threading.Event(), list[float]()

    class Slow(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            if threading.current_thread().name == "ridgeline-attendance":
                is_writing.set()
                may_end.wait()
            super().set(key, value)

    monkeypatch.setattr(attendance, "EVERY_S", 0.01)
    worker = Attendance(Slow(), 0, range(2))
    thread = worker._thread
    join = thread.join

    def joined(limit_s: float) -> None:
        waited.append(limit_s)
        may_end.set()
        join(limit_s)

    monkeypatch.setattr(thread, "join", joined)
    assert is_writing.wait(60.0)
    worker.close(wait=wait)
    assert waited == [attendance.PATIENCE_S]
    assert not thread.is_alive()
