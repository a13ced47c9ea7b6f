"""Programs on threads: results, order, errors, and what is left behind."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.autoparallel.graphs.program import Program, trace_program
from ridgeline.autoparallel.lanes.issue import IssuedPiece, pieces
from ridgeline.autoparallel.lanes.threads import ThreadProgram, measure_sync_s, push_order
from ridgeline.autoparallel.scheduling.schedule import Schedule, needed_syncs
from ridgeline.errors import EngineError, ScheduleError

buffer = torch.zeros(8)


def tangle(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Branches, random numbers and updates in place, which all must keep their order."""
    a = x.sin() @ y.cos()
    b = torch.rand_like(x) + y
    buffer.add_(a.sum(0))
    c = (a * b).tanh() + buffer
    buffer.mul_(0.5)
    d = torch.rand_like(y) * c
    return a + d, (b @ c).exp().sum(), buffer.clone()


@pytest.fixture(scope="module")
def program() -> Program:
    return trace_program(tangle, (torch.randn(8, 8), torch.randn(8, 8)))


def scheduled(program: Program, lane_of: list[int], num_lanes: int) -> Schedule:
    order = tuple(range(len(lane_of)))
    return Schedule(
        lanes=tuple(f"compute:{lane}" for lane in range(num_lanes)),
        lane_of=tuple(lane_of),
        order=order,
        syncs=needed_syncs(program.dag, lane_of, order),
    )


def test_lanes_are_in_the_inference_mode_of_the_caller() -> None:
    """What one thread has made, another may write; results are of inference, as the function's are."""

    def halves(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:4] = x[:4].sin()
        y[4:] = x[4:].cos()
        return y

    x = torch.randn(8, 8)
    program = trace_program(halves, (x,))
    lane_of = [0, *[1] * (len(program.operations) - 1)]
    threads = ThreadProgram(program, scheduled(program, lane_of, 2))
    try:
        with torch.inference_mode():
            result = threads(x)
        assert result.is_inference()
        assert torch.equal(result, halves(x))
        assert not threads(x).is_inference()
    finally:
        threads.close()


@settings(max_examples=30)
@given(st.data())
def test_any_assignment_to_lanes_gives_the_function(program: Program, data: st.DataObject) -> None:
    """Whatever lane an operation is on, results, state and random numbers are the function's, call after call."""
    num_lanes = data.draw(st.integers(1, 4))
    count = len(program.operations)
    lane_of = data.draw(st.lists(st.integers(0, num_lanes - 1), min_size=count, max_size=count))
    threads = ThreadProgram(program, scheduled(program, lane_of, num_lanes))
    try:
        for seed in range(3):
            x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed))
            outcomes = []
            for run in (tangle, threads):
                buffer.zero_()
                torch.manual_seed(seed)
                outcomes.append([*run(x, y), buffer.clone(), torch.rand(1)])
            assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    finally:
        threads.close()


@given(st.data())
def test_the_calling_thread_pushes_its_own_pieces_last(data: st.DataObject) -> None:
    """A piece of lane 0 comes after everything on other lanes that does not need it, and after what it waits for."""
    num_nodes = data.draw(st.integers(1, 12))
    edges = data.draw(
        st.sets(
            st.tuples(st.integers(0, num_nodes - 1), st.integers(0, num_nodes - 1)).filter(
                lambda edge: edge[0] < edge[1]
            )
        )
    )
    lane_of = data.draw(st.lists(st.integers(0, 2), min_size=num_nodes, max_size=num_nodes))
    schedule = Schedule(
        lanes=("compute:0", "compute:1", "compute:2"),
        lane_of=tuple(lane_of),
        order=tuple(range(num_nodes)),
        syncs=tuple(sorted((u, v) for u, v in edges if lane_of[u] != lane_of[v])),
    )
    order = push_order(pieces(schedule))
    pushed: set[int] = set()
    for place, piece in enumerate(order):
        assert pushed.issuperset(piece.waits)
        if piece.lane == 0:
            for other in (p for p in order[place + 1 :] if p.lane != 0):
                assert not _could_go(other, order, pushed)
        pushed.update(piece.nodes)
    assert pushed == set(range(num_nodes))


def _could_go(piece: IssuedPiece, order: list[IssuedPiece], pushed: set[int]) -> bool:
    before = [other for other in order if other.lane == piece.lane and other.nodes < piece.nodes]
    return pushed.issuperset(piece.waits) and all(pushed.issuperset(o.nodes) for o in before)


def test_lanes_run_side_by_side(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two branches meet each other while both run: neither waits for the other's end."""
    two = trace_program(lambda x, y: x.sin() + y.cos(), (torch.ones(2), torch.ones(2)))
    barrier = threading.Barrier(2, timeout=30)
    real = Program.segment

    def meeting(self: Program, operations: Any, **options: Any) -> Any:
        segment = real(self, operations, **options)
        if 2 in operations:  # the sum comes after both
            return segment

        def meet(environment: Any) -> None:
            barrier.wait()
            segment(environment)

        return meet

    monkeypatch.setattr(Program, "segment", meeting)
    threads = ThreadProgram(two, scheduled(two, [0, 1, 0], 2))
    x = torch.randn(2)
    assert torch.equal(threads(x, x), x.sin() + x.cos())
    threads.close()


@pytest.mark.parametrize("failing", [0, 1], ids=["calling thread", "other thread"])
def test_errors_are_the_function_s_own_and_calls_go_on(failing: int) -> None:
    """What an operator raises arrives as it is, says where it was, and the next call works."""
    table = torch.arange(4.0)
    two = trace_program(
        lambda i, j: table[i] * 2 + table[j] * 3, (torch.tensor([0]), torch.tensor([1]))
    )
    threads = ThreadProgram(two, scheduled(two, [0, 0, 1, 1, 0], 2))
    good, bad = torch.tensor([1]), torch.tensor([9])
    with pytest.raises(IndexError, match="out of bounds") as caught:
        threads(*((bad, good) if failing == 0 else (good, bad)))
    assert "in task 'index" in caught.value.__notes__[0]
    assert threads(good, good).tolist() == [5.0]
    threads.close()


def test_the_caller_s_settings_are_left_alone(program: Program) -> None:
    """Threads of an operator are limited during a call only, and gradient mode is the caller's."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        lanes = [index % 2 for index in range(len(program.operations))]
        threads = ThreadProgram(program, scheduled(program, lanes, 2))
        x = torch.randn(8, 8)
        threads(x, x)
        assert torch.get_num_threads() == 2
        assert torch.is_grad_enabled()
        threads.close()
    finally:
        torch.set_num_threads(before)


def test_a_call_that_waited_for_its_turn_leaves_the_settings_alone(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it puts back is what there is when its turn comes, not what the call before had set meanwhile."""

    class Turn:
        def __enter__(self) -> None:
            torch.set_num_threads(2)

        def __exit__(self, *_: object) -> None:
            pass

    lane_of = [index % 2 for index in range(len(program.operations))]
    threads = ThreadProgram(program, scheduled(program, lane_of, 2))
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_lock", Turn())
    try:
        torch.set_num_threads(1)
        threads(torch.randn(8, 8), torch.randn(8, 8))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        threads.close()


def test_the_timeline_is_that_of_the_last_call(program: Program) -> None:
    """One span a piece, on its lane, from the beginning of the first."""
    lanes = [index % 2 for index in range(len(program.operations))]
    threads = ThreadProgram(program, scheduled(program, lanes, 2))
    x = torch.randn(8, 8)
    threads(x, x)
    threads(x, x)
    spans = threads.timeline().spans
    assert len(spans) == len(pieces(threads.schedule))
    assert {span.index for span in spans} == {0, 1}
    assert min(span.start_ns for span in spans) == 0
    threads.close()


def test_a_foreign_schedule_is_refused(program: Program) -> None:
    """The schedule of another program does not fit, nor one that keeps not every edge."""
    with pytest.raises(ScheduleError) as caught:
        ThreadProgram(program, Schedule(lanes=("compute:0",), lane_of=(0,), order=(0,), syncs=()))
    assert str(caught.value) == (
        f"wanted an order of all {len(program.operations)} nodes, each once, got 1 entries that are not; "
        "schedule the graph that is run"
    )
    nodes = tuple(range(len(program.operations)))
    lanes = tuple(f"compute:{node}" for node in nodes)
    with pytest.raises(ScheduleError, match="got a schedule in which nothing orders"):
        ThreadProgram(program, Schedule(lanes=lanes, lane_of=nodes, order=nodes, syncs=()))


def test_closed_threads_refuse_calls(program: Program) -> None:
    """After close() a call is an error of the engine's."""
    threads = ThreadProgram(program, scheduled(program, [0] * len(program.operations), 1))
    threads.close()
    with pytest.raises(EngineError, match="got a closed one"):
        threads(torch.randn(8, 8), torch.randn(8, 8))


def test_waking_a_thread_is_measured() -> None:
    """The cost of a wait for another thread is a positive number of seconds, and no thread is left."""
    assert 0 < measure_sync_s() < 1
