"""Exchanges beside steps: who waits for one of them does not wait for those that started later."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.runtime.sync.local.flights import Flights


class _Stream:
    """A stream that writes down its work, and what of others it has waited for."""

    def __init__(self, *_: Any) -> None:
        self.work: list[Any] = []
        self.waited: list[list[Any]] = []

    def wait_event(self, event: "_Event") -> None:
        self.waited.append(event.work)

    def wait_stream(self, other: "_Stream") -> None:
        self.waited.append(list(other.work))


class _Event:
    """What a stream had done when it was recorded."""

    def record(self, stream: _Stream) -> None:
        self.work = list(stream.work)


def test_a_landing_waits_for_its_own_exchange_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where a fragment leaves in the step in which another one lands; both are waited for at the end."""
    main, made = _Stream(), []

    def stream(device: Any) -> _Stream:
        made.append(_Stream(device))
        return made[0]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    transport: Any = SimpleNamespace(reduce=lambda bucket: made[0].work.append(bucket.index))
    flights = Flights(transport, torch.device("cuda"), is_beside=True)
    first, second = buckets = [SimpleNamespace(index=index) for index in range(2)]
    flights.start(first)  # type: ignore[arg-type]
    flights.start(second)  # type: ignore[arg-type]
    flights.wait([first])  # type: ignore[list-item]
    assert main.waited == [[0]]
    flights.wait(buckets)  # type: ignore[arg-type]
    assert main.waited[-1] == [0, 1]
