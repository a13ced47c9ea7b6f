"""Makes the shared modules importable, hosts as fast as usual, and seconds of choices those of the test."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from ridgeline.decision import budget, trial


class Clock(SimpleNamespace):
    """Goes on by a tick whenever it is read."""

    now_s, tick_s = 0.0, 0.0

    def monotonic(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """That of the seconds given for a choice: it stands still, however busy the machine is."""
    clock = Clock()
    monkeypatch.setattr(budget, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def usual_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, no trial waits for it: their steps are counted."""
    monkeypatch.setattr(trial, "HOST_SPEED", SimpleNamespace(wait=lambda *_: True))
