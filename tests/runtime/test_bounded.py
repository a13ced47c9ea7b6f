"""A call that may never return is given up; one that returns or raises is as it would be without."""

import threading
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import SimpleNamespace

import pytest

from ridgeline.host import bounded
from ridgeline.host.bounded import within


def test_what_returns_and_what_is_raised_comes_through() -> None:
    """A time-out of the call's own, too."""
    assert within(60.0, lambda: 7, "the store") == 7
    for kind in (ValueError, FutureTimeoutError, RuntimeError):

        def fail(kind: type[Exception] = kind) -> None:
            raise kind("its own")

        with pytest.raises(kind, match=r"^its own$"):
            within(60.0, fail, "the store")


def test_what_does_not_return_is_given_up() -> None:
    """With the caller's name for it."""
    end = threading.Event()
    try:
        with pytest.raises(RuntimeError, match=r"^no answer from the store for 50\.0 ms$"):
            within(0.05, end.wait, "the store")
    finally:
        end.set()


def test_an_answer_that_comes_as_the_wait_ends_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no time-out, which would be none that callers of a store expect."""

    class LateFuture(bounded.Future):
        def result(self, timeout: float | None = None) -> object:
            found = super().result()
            if timeout is not None:
                raise FutureTimeoutError
            return found

    monkeypatch.setattr(bounded, "Future", LateFuture)
    assert within(60.0, lambda: 7, "the store") == 7


def test_a_process_that_stood_still_waits_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the time went by in one of its looks, in which nobody else could answer either."""
    now, begun, goes_on = SimpleNamespace(s=0.0), threading.Event(), threading.Event()

    class Stopped(bounded.Future):
        def result(self, timeout: float | None = None) -> object:
            if not now.s:
                begun.wait()
                now.s = 60.0
                raise FutureTimeoutError
            goes_on.set()
            return super().result()

    monkeypatch.setattr(bounded, "Future", Stopped)
    monkeypatch.setattr(bounded, "time", SimpleNamespace(monotonic=lambda: now.s))
    try:
        assert within(5.0, lambda: begun.set() or goes_on.wait(), "the store")
    finally:
        goes_on.set()
