"""A call that may never return is given up; one that returns or raises is as it would be without."""

import threading
from concurrent.futures import TimeoutError as FutureTimeoutError

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
