"""Workers meet at the store before they do together what one might be alone with."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ridgeline.errors import AbsentWorkerError
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.workers import attendance, rendezvous
from ridgeline.workers.attendance import Attendance

CALL = "step.verdict()"
ADVICE = f"call {CALL} on all workers, and print what it gives on one"


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Attendance, Attendance]]:
    """Two workers in one process, each after its first step; the first is this one."""
    store = dist.HashStore()
    workers = Attendance(store, 0, range(2)), Attendance(store, 1, range(2))
    for worker in workers:
        step(worker)
        worker.end_step("step")
        worker.publish()
    monkeypatch.setattr(attendance, "of", lambda world: workers[0])
    yield workers
    for worker in workers:
        worker.close()


def step(worker: Attendance) -> None:
    worker.begin_step(
        "step" if worker.row().completed else worker.enroll("step"), Recorder(HostClock())
    )


def world(timeout_s: float = 60.0) -> Any:
    return SimpleNamespace(timeout_s=timeout_s)


def come(worker: Attendance) -> None:
    worker.num_rendezvous += 1
    worker.publish()
    rendezvous._come(worker, 1)


def met() -> contextlib.AbstractContextManager[None]:
    return rendezvous.rendezvous(CALL, ADVICE, world())


def test_who_comes_later_is_waited_for(
    both: tuple[Attendance, Attendance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that may be steps ahead; then both go on."""
    _, other = both
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: come(other))
    with met():
        assert both[0].phases == [CALL]
        with met():  # all are in something already
            assert both[0].row().num_rendezvous == 1
    step(other)
    other.publish()
    both[0].are_apart = True
    with met():
        assert both[0].row().num_rendezvous == other.row().num_rendezvous == 2


def test_who_went_on_is_named(both: tuple[Attendance, Attendance]) -> None:
    """Once it is seen to wait, as a collective would meet that of its step."""
    _, other = both
    step(other)
    other.publish()
    with (
        pytest.raises(
            AbsentWorkerError, match=r"none from rank 1: it runs .*, in step 2\b"
        ) as told,
        met(),
    ):
        raise AssertionError("alone inside")
    assert str(told.value).endswith(f"{ADVICE[0].upper()}{ADVICE[1:]}")
    # Who comes later does not take this worker's vain wait for its presence.
    come(other)
    assert rendezvous._come(other, 0) == 1
    assert not both[0].num_rendezvous


def test_who_does_not_come_is_named(both: tuple[Attendance, Attendance]) -> None:
    """When the time-out of the group is over, or its process gone; what ended it stays the cause."""
    _, other = both
    with (
        pytest.raises(AbsentWorkerError, match=r"between two steps.*Call step"),
        rendezvous.rendezvous(CALL, ADVICE, world(timeout_s=0.0)),
    ):
        raise AssertionError("alone inside")
    other.stopped(ValueError("boom"))
    other._pid = ended_process()
    other.publish()
    with (
        pytest.raises(AbsentWorkerError, match=r"it raised ValueError: boom.*See the traceback"),
        met(),
    ):
        raise AssertionError("alone inside")


def test_who_caught_an_error_may_come_yet(
    both: tuple[Attendance, Attendance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts that begin again with a smaller batch, on some workers from another place of the step."""
    mine, other = both
    step(mine)
    mine.stopped(ValueError("boom"))
    step(other)
    other.call()
    other.stopped(ValueError("boom"))
    assert mine.row().rounds < other.row().rounds
    looks = iter([lambda: None, lambda: come(other)])
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: next(looks)())
    monkeypatch.setattr(rendezvous, "EVERY_S", 0.0)
    with met():
        other.count_alike()
        assert mine.row().rounds == other.row().rounds


def ended_process() -> int:
    """Its number."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_job_that_is_joined_again_hears_nothing_of_before() -> None:
    """Torch gives its groups the same names again, in a store that may be the same."""
    store, found = dist.HashStore(), []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        group = dist.group.WORLD
        found.append(
            attendance.of(
                SimpleNamespace(size=2, process_group=group, rank=0, ranks=lambda: (0, 1))  # type: ignore[arg-type]
            )
        )
        dist.destroy_process_group()
    assert found[0].group != found[1].group
