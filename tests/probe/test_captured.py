"""Operators that launch many kernels are timed inside captures, which may fail; with stand-ins for CUDA."""

import contextlib
from typing import Any

import pytest
import torch
from test_replay import workload_of

from ridgeline.errors import DeviceLostError
from ridgeline.probe.operators import captured
from ridgeline.probe.operators.captured import captured_seconds
from ridgeline.probe.operators.replay import WorkloadReplay

CPU = torch.device("cpu")


class Stream:
    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class Event:
    def __init__(self, **_: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 2.0


class Graph:
    """Tells what is done; from number `good` on it refuses to end."""

    log: list[str]
    good = 100

    def capture_begin(self) -> None:
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")
        if self.log.count("end") > self.good:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.log.append("replay")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What graphs are told."""
    done: list[str] = []
    monkeypatch.setattr(Graph, "log", done, raising=False)
    for name, stand_in in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "current_stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return done


def wanted_key(monkeypatch: pytest.MonkeyPatch, ops: Any) -> str:
    """The key of the one operator that stands for a recurrent layer."""
    chosen = next(op for op in ops if op.name.startswith("aten.addmm"))
    monkeypatch.setattr(captured, "launches_many", lambda op: op.key == chosen.key)
    return chosen.key


def test_each_is_captured_and_replayed(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is that of the replays; all others are issued as they are."""
    workload = workload_of()
    key = wanted_key(monkeypatch, workload.ops)
    count = sum(op.key == key for op in workload.ops)
    found = captured_seconds(WorkloadReplay(workload.ops, CPU), workload.ops, CPU)
    assert {key: quantity.value for key, quantity in found.items()} == {key: 2e-3}
    assert log == ["begin", "end", *["replay"] * captured.REPLAYS] * count


def test_without_one_nothing_runs(log: list[str]) -> None:
    """No pass over the step is made."""
    workload = workload_of()
    assert captured_seconds(WorkloadReplay(workload.ops, CPU), workload.ops, CPU) == {}
    assert log == []


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_capture_that_fails_tells_nothing(
    is_lost: bool, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as a timing nor as a failure of the operator, which was timed before without one."""
    workload = workload_of()
    monkeypatch.setattr(captured, "launches_many", lambda op: "mm." in op.name)
    monkeypatch.setattr(Graph, "good", 1)
    replay = WorkloadReplay(workload.ops, CPU)
    if is_lost:

        def lost(self: WorkloadReplay, index: int) -> None:
            raise DeviceLostError("wanted a GPU that goes on", "a capture is open")

        monkeypatch.setattr(WorkloadReplay, "_check_device", lost)
    assert captured_seconds(replay, workload.ops, CPU) == {}
    assert replay.failures == {}
    assert log[:4] == ["begin", "end", "replay", "replay"]
