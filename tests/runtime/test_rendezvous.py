"""Workers meet at the store before they do together what one might be alone with."""

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
ADVICE = f"Call {CALL} on all workers, and print what it gives on one"


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


def test_who_comes_later_is_waited_for(
    both: tuple[Attendance, Attendance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that may be steps ahead; then both go on."""
    _, other = both
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: come(other))
    with rendezvous.rendezvous(CALL, world()):
        assert both[0].phases == [CALL]
    step(other)
    other.publish()
    with rendezvous.rendezvous(CALL, world(), are_apart=True):
        assert both[0].row().num_rendezvous == other.row().num_rendezvous == 2


def test_who_went_on_is_named(both: tuple[Attendance, Attendance]) -> None:
    """At once, as a collective would meet that of its step."""
    _, other = both
    step(other)
    other.publish()
    with (
        pytest.raises(
            AbsentWorkerError, match=r"none from rank 1: it runs .*, in step 2\b"
        ) as told,
        rendezvous.rendezvous(CALL, world()),
    ):
        raise AssertionError("alone inside")
    assert str(told.value).endswith(ADVICE)


def test_who_left_or_does_not_come_is_named(both: tuple[Attendance, Attendance]) -> None:
    """One that left at once, one that runs when the time-out of the group is over; what ended it stays the cause."""
    _, other = both
    with (
        pytest.raises(AbsentWorkerError, match=f"between two steps.*{ADVICE[:8]}"),
        rendezvous.rendezvous(CALL, world(timeout_s=0.0)),
    ):
        raise AssertionError("alone inside")
    other.stopped(ValueError("boom"))
    other.publish()
    with (
        pytest.raises(AbsentWorkerError, match=r"it raised ValueError: boom.*See the traceback"),
        rendezvous.rendezvous(CALL, world()),
    ):
        raise AssertionError("alone inside")
    other.close()
