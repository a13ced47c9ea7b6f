"""Stream lanes: who waits for whom, in which order, and what a capture may see."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeStream
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine import Engine
from ridgeline.engine.lanes.streams import (
    StreamEvent,
    StreamLane,
    device_lanes,
    events_to_wait_for,
    leave_event,
)
from ridgeline.engine.task import Variable
from ridgeline.errors import EngineError

NUM_VARIABLES = 4
indices = st.sets(st.integers(0, NUM_VARIABLES - 1), max_size=3)
programs = st.lists(st.tuples(st.integers(0, 3), indices, indices), max_size=25)


@given(programs)
def test_streams_and_events_imply_every_dependency(
    program: list[tuple[int, set[int], set[int]]],
) -> None:
    """Whoever must come before a task is ordered before it; nobody waits twice, or for itself."""
    variables = [Variable(str(index)) for index in range(NUM_VARIABLES)]
    before: list[set[int]] = []  # of each task: everything that its stream has behind it
    on_stream: dict[int, set[int]] = {}
    for task, (stream, reads, writes) in enumerate(program):
        read = [variables[i] for i in reads - writes]
        written = [variables[i] for i in writes]
        events = events_to_wait_for(read, written, stream)
        sources = [program[event][0] for event in events]
        assert stream not in sources
        assert len(set(sources)) == len(sources)
        known = on_stream.setdefault(stream, set())
        for event in events:
            known |= before[event] | {event}
        for other, (_, other_reads, other_writes) in enumerate(program[:task]):
            conflict = (other_writes & (reads | writes)) | (other_reads & writes)
            assert not conflict or other in known
        before.append(set(known))
        known.add(task)
        leave_event(read, written, stream, task, task)


def test_only_what_is_needed_is_waited_for() -> None:
    """Readers do not wait for readers; a write stands for the reads before it."""
    x = Variable("x")
    leave_event((), (x,), "a", "written", 1)
    assert events_to_wait_for((x,), (), "a") == []
    assert events_to_wait_for((x,), (), "b") == ["written"]
    leave_event((x,), (), "b", "read", 2)
    leave_event((x,), (), "b", "read again", 3)
    assert events_to_wait_for((x,), (), "c") == ["written"]
    assert events_to_wait_for((), (x,), "c") == ["written", "read again"]
    leave_event((), (x,), "c", "written again", 4)
    assert events_to_wait_for((), (x,), "d") == ["written again"]


@pytest.mark.parametrize(
    ("capturing", "is_open", "waits"),
    [
        (False, None, True),
        (True, lambda: True, True),
        (True, None, False),
        (True, lambda: False, False),
        (False, lambda: False, False),
    ],
)
def test_a_capture_sees_its_own_events_only(
    monkeypatch: pytest.MonkeyPatch,
    capturing: bool,
    is_open: Callable[[], bool] | None,
    waits: bool,
) -> None:
    """And nobody outside waits for what was captured: it never happens."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    waited: list[int] = []
    StreamEvent(SimpleNamespace(wait=lambda: waited.append(1)), is_open).wait()
    assert bool(waited) is waits


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.use)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: fake.current.name in fake.capturing
    )
    return fake


def lanes_of(cuda: FakeCuda) -> dict[str, Any]:
    """Two lanes with streams, and one on the caller's."""
    streams = {name: FakeStream(cuda, name) for name in ("copy-in", "copy-out")}
    made: dict[str, Any] = {
        name: lambda finish, stream=stream: StreamLane(finish, stream)
        for name, stream in streams.items()
    }
    return {**made, "compute": StreamLane}


def test_tasks_wait_on_the_device_for_other_streams_only(cuda: FakeCuda) -> None:
    """For what the pusher enqueued before, and for what they depend on; a wait is the caller's stream's."""
    with Engine(lanes=lanes_of(cuda)) as engine:
        x = engine.variable("x")
        engine.push(lambda: cuda.ran("load"), writes=(x,), lane="copy-in")
        engine.push(lambda: cuda.ran("more"), writes=(x,), lane="copy-in")
        engine.push(lambda: cuda.ran("step"), reads=(x,), lane="compute")
        engine.push(lambda: cuda.ran("send"), reads=(x,), lane="copy-out")
        engine.wait(x)
    assert cuda.log == [
        ("copy-in", "waits for", "main"),
        ("copy-in", "runs", "load"),
        ("copy-in", "waits for", "main"),
        ("copy-in", "runs", "more"),
        ("main", "waits for", "copy-in"),
        ("main", "runs", "step"),
        ("copy-out", "waits for", "main"),
        ("copy-out", "waits for", "copy-in"),
        ("copy-out", "runs", "send"),
        ("main", "waits for", "copy-in"),
    ]


def test_a_task_of_a_thread_waits_on_the_host(cuda: FakeCuda) -> None:
    """It has no stream that could wait for it."""
    with Engine(lanes=lanes_of(cuda)) as engine:
        x = engine.variable("x")
        engine.push(lambda: cuda.ran("send"), writes=(x,), lane="copy-out")
        engine.push(lambda: cuda.log.append(("host", "runs", "save")), reads=(x,), lane="disk")
        engine.wait_all()
        assert cuda.log[:4] == [
            ("copy-out", "waits for", "main"),
            ("copy-out", "runs", "send"),
            ("host", "waits for", "copy-out"),
            ("host", "runs", "save"),
        ]


def test_tasks_are_launched_in_push_order_and_failures_are_skipped(cuda: FakeCuda) -> None:
    """Whatever became ready first; what depends on a failure never runs, what does not goes on."""
    gate = threading.Event()

    def fail() -> None:
        raise ValueError("no")

    with Engine(lanes=lanes_of(cuda)) as engine:
        x, y = engine.variable("x"), engine.variable("y")
        engine.push(gate.wait, writes=(x,), lane="loader")
        engine.push(lambda: cuda.ran("second"), reads=(x,), lane="copy-in")
        engine.push(lambda: cuda.ran("third"), lane="copy-in")
        engine.push(fail, writes=(y,), lane="copy-in")
        engine.push(lambda: cuda.ran("skipped"), reads=(y,), lane="copy-in")
        engine.push(lambda: cuda.ran("last"), lane="copy-in")
        gate.set()
        with pytest.raises(EngineError, match="ValueError: no"):
            engine.wait_all()
    ran = [what for _, verb, what in cuda.log if verb == "runs"]
    assert ran == ["second", "third", "last"]


def test_a_task_runs_on_the_stream_of_its_own_push(cuda: FakeCuda) -> None:
    """The lane without a stream of its own follows the caller, also after a skipped task."""
    with Engine(lanes=lanes_of(cuda)) as engine:
        x = engine.variable("x")
        engine.push(lambda: 1 / 0, writes=(x,), lane="compute")
        engine.push(lambda: cuda.ran("skipped"), reads=(x,), lane="compute")
        with cuda.use(FakeStream(cuda, "side")):
            engine.push(lambda: cuda.ran("here"), lane="compute")
        engine.push(lambda: cuda.ran("there"), lane="compute")
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            engine.wait_all()
    ran = [entry for entry in cuda.log if entry[1] == "runs"]
    assert ran == [("side", "runs", "here"), ("main", "runs", "there")]


def test_lanes_join_a_capture_and_are_brought_back(cuda: FakeCuda) -> None:
    """Events from before are left alone; a second capture does not see those of the first."""
    with Engine(lanes=lanes_of(cuda)) as engine:
        x = engine.variable("x")
        engine.push(lambda: cuda.ran("before"), writes=(x,), lane="copy-in")
        for _ in range(2):
            cuda.log.clear()
            with cuda.capture():
                engine.push(lambda: cuda.ran("step"), reads=(x,), lane="copy-out")
                engine.push(lambda: cuda.ran("load"), writes=(x,), lane="copy-in")
                engine.push(lambda: cuda.ran("more"), writes=(x,), lane="compute")
                engine.wait_all()
            assert cuda.log[:-2] == [
                ("copy-out", "waits for", "main"),
                ("copy-out", "runs", "step"),
                ("copy-in", "waits for", "main"),
                ("copy-in", "waits for", "copy-out"),
                ("copy-in", "runs", "load"),
                ("main", "waits for", "copy-in"),
                ("main", "runs", "more"),
            ]
            assert set(cuda.log[-2:]) == {
                ("main", "waits for", "copy-out"),
                ("main", "waits for", "copy-in"),
            }
        cuda.log.clear()
        engine.push(lambda: cuda.ran("after"), writes=(x,), lane="copy-in")
        engine.wait(x)
        assert cuda.log == [
            ("copy-in", "waits for", "main"),
            ("copy-in", "runs", "after"),
            ("main", "waits for", "copy-in"),
        ]


def test_a_capture_that_single_waits_brought_back_is_over_too(cuda: FakeCuda) -> None:
    """A stream that joins a capture anew makes its older events void."""
    with Engine(lanes=lanes_of(cuda)) as engine:
        x, y = engine.variable("x"), engine.variable("y")
        for _ in range(2):
            with cuda.capture():
                engine.push(lambda: cuda.ran("look"), reads=(y,), lane="copy-out")
                engine.push(lambda: cuda.ran("other"), lane="copy-in")
                engine.push(lambda: cuda.ran("look again"), reads=(y,), lane="copy-out")
                engine.push(lambda: cuda.ran("load"), writes=(y,), lane="copy-in")
                engine.push(lambda: cuda.ran("send"), reads=(y,), writes=(x,), lane="copy-out")
                engine.wait(x)
    assert cuda.log.count(("copy-out", "waits for", "copy-in")) == 2


def test_the_host_cannot_wait_for_a_capture(cuda: FakeCuda) -> None:
    """A CPU task on captured results is an error, not a hang."""
    with Engine(lanes=lanes_of(cuda)) as engine, cuda.capture():
        x = engine.variable("x")
        engine.push(lambda: cuda.ran("send"), writes=(x,), lane="copy-out")
        engine.push(lambda: None, reads=(x,), lane="disk")
        with pytest.raises(EngineError, match="got one that was captured into a CUDA graph"):
            engine.wait_all()


def test_lanes_of_a_device_are_named_by_its_index() -> None:
    """No stream is made before an engine asks; a device without index is refused."""
    assert sorted(device_lanes("cuda:1")) == [
        "communication:1",
        "compute:1",
        "copy-in:1",
        "copy-out:1",
    ]
    with pytest.raises(EngineError, match=r"wanted a CUDA device with its index, .* got cpu"):
        device_lanes("cpu")
