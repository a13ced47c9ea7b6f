"""A limit on work that offers none itself: it ends in an error, and nothing is raised once it is over."""

import math
import threading

import pytest

from ridgeline.errors import CaptureError
from ridgeline.runtime.deadline import deadline


def test_what_takes_too_long_is_stopped() -> None:
    """Though it catches every `Exception`, as compilers do."""
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
        "wanted the step compiled within 50.0 ms, got no end of it: it was stopped; allow more seconds, or "
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
