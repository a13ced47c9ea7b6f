"""The host's time to issue ops is read while a GPU's queue has room for more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline.probe.operators.clock import STRETCH, ReplayClock
from ridgeline.probe.operators.replay import ReplayWatch


class Issued:
    """A replay of so many ops: tells what was done around each."""

    def __init__(self, count: int, events: list[Any]) -> None:
        self._count, self._events = count, events

    def run(
        self, wanted: Callable[[int], bool], mark: Callable[[], int], watch: ReplayWatch
    ) -> dict[int, tuple[int, int]]:
        marks = {}
        for index in range(self._count):
            if watch.pace is not None:
                watch.pace()
            begin = mark()
            self._events.append(index)
            marks[index] = begin, mark()
        return marks


def test_the_queue_is_emptied_outside_of_what_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every so many ops, which have room in it: the host never waits inside of one."""
    events: list[Any] = []
    now_ns = [0]

    def synchronize(device: torch.device) -> None:
        events.append("wait")
        now_ns[0] += 10**9

    def clock() -> int:
        now_ns[0] += 1000
        return now_ns[0]

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    replay: Any = Issued(2 * STRETCH + 10, events)
    taken = ReplayClock(torch.device("cpu"), now_ns=clock).issuing(replay)
    assert [place for place, event in enumerate(events) if event == "wait"] == [
        STRETCH - 1,
        2 * STRETCH,
    ]
    assert [*taken.values()] == pytest.approx([1e-6] * len(taken))
