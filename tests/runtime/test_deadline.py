"""A limit on work that offers none itself: it ends in an error, and nothing is raised once it is over."""

import contextlib
import math
import signal
import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from torch.utils import _python_dispatch as dispatch

from ridgeline.capture import deadline as limits
from ridgeline.capture.deadline import deadline, undisturbed
from ridgeline.errors import CaptureError, PlanError


def test_what_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it catches every `Exception`, as compilers do."""
    monkeypatch.setattr(limits, "LATE_S", math.inf)  # a host may be busy
    rounds = 0

    def stubborn() -> None:
        nonlocal rounds
        while True:
            try:
                rounds += 1
            except Exception:  # noqa: BLE001 - what is tested
                rounds = -1

    with pytest.raises(CaptureError) as caught, deadline(0.05, "the step compiled"):
        stubborn()
    assert str(caught.value) == (
        "wanted the step compiled within 50.0 ms, got no result: it was stopped; allow more seconds, or "
        "use execution='eager'"
    )
    assert rounds > 0


@pytest.mark.parametrize("limit_s", [60.0, math.inf])
def test_what_ends_in_time_is_left_alone(limit_s: float) -> None:
    """Its result and its own errors pass, and no thread is left to wait."""
    threads = {*threading.enumerate()}
    with deadline(limit_s, "it"):
        total = sum(range(1000))
    assert total == 499500
    with pytest.raises(ZeroDivisionError), deadline(limit_s, "it"):
        _ = 1 / 0
    for thread in {*threading.enumerate()} - threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_a_limit_that_is_over_is_over() -> None:
    """Thousands of limits that ring at about the time at which the work ends raise inside or not at all."""
    stopped = 0
    for number in range(300):
        try:
            with deadline(1e-4 * (number % 5), "it"):
                for _ in range(200):
                    pass
        except CaptureError:
            stopped += 1
        assert sum(range(100)) == 4950
    assert stopped > 0


class Striker:
    """Has the limits of this thread ring at the given one of the moments that a profiler sees."""

    def __init__(self, moment: int) -> None:
        self._left = moment
        self.waiting: set[threading.Thread] = set()
        self.has_struck = False

    def __call__(self, frame: FrameType, *_: object) -> None:
        self.waiting.update(alarm._waiting for alarm in limits._here.alarms)
        self._left -= 1
        if not self._left:
            sys.setprofile(None)
            self.has_struck = True
            for alarm in limits._here.alarms:
                alarm.has_rung = True
            limits._arrive(signal.SIGURG, frame)


def test_a_limit_may_ring_at_any_moment_of_its_begin_and_end() -> None:
    """Nobody else gets what is raised for it, its thread ends, and nothing that it has locked stays so."""
    moment = stopped = 0
    has_struck = True
    while has_struck:
        moment += 1
        striker = Striker(moment)
        try:
            sys.setprofile(striker)
            with deadline(60.0, "it"):
                pass
        except CaptureError:
            stopped += 1
        finally:
            sys.setprofile(None)
        assert limits._here.alarms == []
        for thread in striker.waiting:
            thread.join()
        has_struck = striker.has_struck
    assert 0 < stopped < moment


def test_waiting_is_ended() -> None:
    """For a lock that nobody releases, as for a compiler that does not end; the signal is nobody's afterwards."""
    before = signal.getsignal(signal.SIGURG)
    held = threading.Lock()
    held.acquire()
    late = pytest.raises(PlanError, match=r"wanted the lock within 50\.0 ms, got no result")
    with late, deadline(0.05, "the lock", error=PlanError):
        held.acquire()
    assert signal.getsignal(signal.SIGURG) is before


def test_each_of_two_limits_raises_its_own_error() -> None:
    """Whichever is over first, and whether it is the inner or the outer one."""
    for outer_s, inner_s, what in ((0.05, 60.0, "all"), (60.0, 0.05, "a part")):
        late = pytest.raises(CaptureError, match=f"wanted {what} within 50.0 ms")
        with late, deadline(outer_s, "all"), deadline(inner_s, "a part"):
            threading.Event().wait()


@pytest.mark.parametrize("is_main", [True, False])
def test_what_must_not_be_stopped_is_not(is_main: bool) -> None:
    """The limit stops what comes after it, in the main thread as in any other."""
    done: list[str] = []

    def work() -> None:
        try:
            limits._here.lock.acquire()  # without it no limit is reached
            with deadline(0.05, "it"):
                with undisturbed():
                    limits._here.lock.release()
                    alarm = limits._here.alarms[-1]
                    while not alarm.has_rung:
                        pass
                    done.append("inside")
                while True:
                    done.append("after")
        except CaptureError:
            done.append("stopped")

    if is_main:
        work()
    else:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert done[0] == "inside"
    assert done[-1] == "stopped"


def test_a_limit_that_was_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what a destructor raises."""
    monkeypatch.setattr(limits, "AGAIN_S", 0.01)
    rounds = 0

    def swallow_one() -> None:
        nonlocal rounds
        with contextlib.suppress(BaseException):
            while True:
                rounds += 1
        while True:
            rounds -= 1

    with pytest.raises(CaptureError), deadline(0.3, "it"):
        swallow_one()


def test_modes_of_what_was_stopped_are_left() -> None:
    """A compiler that is stopped between entering its mode and noting that leaves it on."""

    class Mode(dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, *rest: Any) -> Any:
            raise AssertionError(func)

    assert not dispatch._get_current_dispatch_mode_stack()

    def enter_and_wait() -> None:
        Mode().__enter__()
        threading.Event().wait()

    with pytest.raises(CaptureError), deadline(0.05, "it"):
        enter_and_wait()
    assert not dispatch._get_current_dispatch_mode_stack()


def test_it_is_said_how_late_a_limit_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call into a library had to end first; the clock is the test's."""
    times = iter([0.0, 4.5])
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with pytest.raises(CaptureError) as caught, deadline(2.0, "it"):
        raise limits._here.alarms[-1].kind
    assert str(caught.value) == (
        "wanted it within 2.00 s, got no result: it was stopped, 2.50 s late, as a call into a library had "
        "to end first; allow more seconds, or use execution='eager'"
    )
