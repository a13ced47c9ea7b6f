"""Whether the host is as fast as usual is told by loops of Python, and waited for no longer than wanted."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.host.speed import _LOOPS, MOST_WAIT_S, SLOW, HostSpeed


class Clock:
    """Each loop takes as long as told, the last figure for ever; nothing else takes any time."""

    def __init__(self, loops_s: list[float]) -> None:
        self.now_s, self._loops_s, self._reads = 0.0, loops_s, 0
        self.num_loops = 0

    def __call__(self) -> float:
        return self.now_s

    def loop(self) -> float:
        taken_s = self._loops_s[min(self.num_loops // _LOOPS, len(self._loops_s) - 1)]
        self.num_loops += 1
        self.now_s += taken_s
        return taken_s


def speed_of(loops_s: list[float], patch: Callable[..., None]) -> tuple[HostSpeed, Clock]:
    clock = Clock(loops_s)
    speed = HostSpeed(clock)
    patch(speed, "_loop_s", clock.loop)
    return speed, clock


@given(loops_s=st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=8))
def test_a_host_is_slow_beside_the_fastest_it_was(loops_s: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        speed, _ = speed_of(loops_s, patch.setattr)
        for number, taken_s in enumerate(loops_s):
            best_s = min(loops_s[: number + 1])
            assert speed.is_slow() == (taken_s > SLOW * best_s)
            assert speed.best_s == best_s


def test_it_is_waited_for_until_it_is_as_fast_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, clock = speed_of([0.01, 0.02, 0.02, 0.011], monkeypatch.setattr)
    assert speed.wait(0.0)
    assert speed.wait()
    assert clock.num_loops == 4 * _LOOPS


def test_it_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor, by all measurements of a process together, for longer than by one."""
    speed, clock = speed_of([0.125, 0.25], monkeypatch.setattr)
    assert speed.wait()
    assert not speed.wait(1.0)
    assert clock.num_loops == 3 * _LOOPS
    assert not speed.wait()
    assert MOST_WAIT_S <= clock.now_s < MOST_WAIT_S + 3 * _LOOPS * 0.25
    looked = clock.num_loops
    assert not speed.wait()
    assert clock.num_loops == looked + _LOOPS


def test_a_loop_takes_time() -> None:
    """Of a real clock, too."""
    speed = HostSpeed()
    assert not speed.is_slow()
    assert 0.0 < speed.best_s < 1.0
