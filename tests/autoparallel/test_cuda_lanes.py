"""Streams without a GPU: stand-ins that remember what each piece of work comes after."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.autoparallel.graphs.dag import Dag
from ridgeline.autoparallel.lanes.cuda_lanes import CudaLanes, Route
from ridgeline.autoparallel.lanes.issue import pieces
from ridgeline.autoparallel.scheduling.schedule import Schedule, needed_syncs
from ridgeline.autoparallel.scheduling.transfers import Copy, Traffic, plan_transfers

Work = frozenset[str]
"""What comes before: names of work."""


class Stream:
    """Work in order; `done` is all that comes before what is enqueued next."""

    numbers = itertools.count()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.done: Work = frozenset()
        self.number = next(self.numbers)

    def run(self, name: str) -> Work:
        before = self.done
        self.done |= {name}
        return before

    def wait_event(self, event: "Event") -> None:
        self.done |= event.done


class Event:
    """What a stream had in it when it was recorded."""

    def __init__(self) -> None:
        self.done: Work = frozenset()

    def record(self, stream: Stream) -> None:
        self.done = stream.done

    def synchronize(self) -> None:
        Gpus.host |= self.done


class Gpus:
    """The current device, the current stream of each, and what the host has waited for."""

    device = 0
    host: Work = frozenset()
    current: dict[int, Stream] = {}

    @classmethod
    def set_stream(cls, stream: Stream) -> None:
        cls.current[stream.device.index] = stream
        cls.device = stream.device.index

    @classmethod
    def set_device(cls, device: int) -> None:
        cls.device = device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> type[Gpus]:
    Gpus.device, Gpus.host = 0, frozenset()
    Gpus.current = {index: Stream(torch.device("cuda", index)) for index in range(3)}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Gpus.current[device.index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: Gpus.device)
    monkeypatch.setattr(torch.cuda, "set_stream", Gpus.set_stream)
    monkeypatch.setattr(torch.cuda, "set_device", Gpus.set_device)
    return Gpus


@st.composite
def scheduled(draw: st.DrawFn) -> tuple[Dag, Schedule]:
    count = draw(st.integers(1, 10))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    dag = Dag.of(count, draw(st.sets(st.sampled_from(pairs), max_size=14)) if pairs else ())
    lanes = draw(st.integers(1, 4))
    lane_of = tuple(draw(st.integers(0, lanes - 1)) for _ in range(count))
    order = tuple(range(count))
    names = tuple(f"compute:{lane}" for lane in range(lanes))
    syncs = needed_syncs(dag, lane_of, order)
    return dag, Schedule(lanes=names, lane_of=lane_of, order=order, syncs=syncs)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scheduled())
def test_streams_keep_every_edge_and_the_place_among_the_callers_work(
    gpus: type[Gpus], case: tuple[Dag, Schedule]
) -> None:
    """An operation comes after all it waits for and after the caller's earlier work; later work after all of it."""
    dag, schedule = case
    device = torch.device("cuda", 1)
    gpus.device = 0
    caller = gpus.current[1]
    lanes = CudaLanes(
        [Route(device, device, is_own=lane > 0) for lane in range(schedule.num_lanes)],
        dag.num_nodes,
    )
    for call in range(2):
        caller.run(f"before {call}")
        lanes.fork()
        came_after: dict[int, Work] = {}
        for piece in pieces(schedule):
            lanes.enter(piece.lane)
            for node in piece.waits:
                lanes.wait(node)
            for node in piece.nodes:
                came_after[node] = gpus.current[1].run(f"{call}:{node}")
            if piece.signals:
                lanes.signal(piece.nodes[-1])
        lanes.join()
        for u, v in dag.edges:
            assert f"{call}:{u}" in came_after[v]
        assert all(f"before {call}" in before for before in came_after.values())
        assert caller.done >= {f"{call}:{node}" for node in range(dag.num_nodes)}
        assert gpus.current[1] is caller
        assert gpus.device == 0
    assert gpus.host == frozenset()


def test_copies_between_gpus_use_a_stream_on_each(gpus: type[Gpus]) -> None:
    """A copy waits for the maker on the source, its reader for the copy on the target, and no GPU stops for it."""
    cuda = [torch.device("cuda", index) for index in range(2)]
    dag = Dag.of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    traffic = Traffic([(), (0,), (0,), (1, 2)], [(0,), (1,), (2,), (3,)], {})
    plan = plan_transfers(dag, (0, 0, 1, 1), traffic)
    routes = [Route(cuda[s], cuda[t], is_own=s != t) for s, t in plan.routes]
    lanes = CudaLanes(routes, len(plan.steps))
    callers = [gpus.current[0], gpus.current[1]]
    lanes.fork()
    came_after: dict[int | Copy, Work] = {}
    for piece in pieces(plan.schedule):
        lanes.enter(piece.lane)
        for step in piece.waits:
            lanes.wait(step)
        for step in piece.nodes:
            source, target = plan.routes[piece.lane]
            reading, writing = gpus.current[source], gpus.current[target]
            if source != target:  # torch orders a copy on both streams
                reading.done |= writing.done
            what = plan.steps[step]
            came_after[what] = reading.run(str(what))
            writing.done |= reading.done
        if piece.signals:
            lanes.signal(piece.nodes[-1])
    lanes.join()
    assert len(came_after) == 6
    assert "0" in came_after[Copy(0, 0, 1)]
    assert "1" not in came_after[Copy(0, 0, 1)]
    assert str(Copy(0, 0, 1)) in came_after[2]
    assert {str(Copy(1, 0, 1)), "2"} <= came_after[3]
    assert callers[1].done >= {"2", "3", str(Copy(0, 0, 1)), str(Copy(1, 0, 1))}
    assert [gpus.current[0], gpus.current[1]] == callers
    assert gpus.device == 0
    assert gpus.host == frozenset()


def test_the_host_waits_only_where_it_works_itself(gpus: type[Gpus]) -> None:
    """A lane on the CPU waits for a copy on the host, and what it made is there without an event."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    lanes = CudaLanes(
        [Route(cuda, cuda, is_own=False), Route(cuda, cpu), Route(cpu, cpu, is_own=False)], 3
    )
    lanes.fork()
    lanes.enter(0)
    gpus.current[0].run("product")
    lanes.signal(0)
    lanes.enter(1)
    lanes.wait(0)
    gpus.current[0].run("copy")
    lanes.signal(1)
    assert gpus.host == frozenset()
    lanes.enter(2)
    lanes.wait(1)
    assert gpus.host >= {"product", "copy"}
    lanes.signal(2)
    lanes.enter(0)
    lanes.wait(2)
    lanes.join()
