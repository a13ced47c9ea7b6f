"""The virtual clock: laws of any schedule, and cases worked out by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.simulator.events import (
    READY_ORDER_LANES,
    SimTask,
    dependencies,
    run_tasks,
)
from ridgeline.timeline import Span
from strategies import sim_tasks

slowdowns = st.fixed_dictionaries(
    {"compute": st.floats(1.0, 3.0), "communication": st.floats(1.0, 3.0)}
)


def _end(spans: tuple[Span, ...]) -> int:
    return max((span.end_ns for span in spans), default=0)


def _task(name: str, lane: str, duration_ns: int, **more: object) -> SimTask:
    return SimTask(name=name, lane=lane, duration_ns=duration_ns, **more)


@given(sim_tasks, slowdowns)
def test_a_lane_runs_one_task_at_a_time(tasks: list[SimTask], slowdown: dict) -> None:
    """Spans on one lane never overlap."""
    spans = run_tasks(tasks, slowdown)
    for lane in {span.lane for span in spans}:
        ordered = sorted((s for s in spans if s.lane == lane), key=lambda s: (s.start_ns, s.end_ns))
        for before, after in itertools.pairwise(ordered):
            assert before.end_ns <= after.start_ns


@given(sim_tasks, slowdowns)
def test_lanes_keep_the_order_of_issue(tasks: list[SimTask], slowdown: dict) -> None:
    """On a lane that is not by priority, tasks start in the order given."""
    spans = run_tasks(tasks, slowdown)
    for lane in {span.lane for span in spans} - READY_ORDER_LANES:
        starts = [span.start_ns for span in spans if span.lane == lane]
        assert starts == sorted(starts)


@given(sim_tasks, slowdowns)
def test_dependencies_and_releases_hold(tasks: list[SimTask], slowdown: dict) -> None:
    """No task starts before its release, nor before a task that it depends on has ended."""
    spans = run_tasks(tasks, slowdown)
    for index, before in enumerate(dependencies(tasks)):
        assert spans[index].start_ns >= tasks[index].release_ns
        for other in before:
            assert spans[other].end_ns <= spans[index].start_ns


@given(sim_tasks)
def test_no_schedule_beats_its_bounds(tasks: list[SimTask]) -> None:
    """The makespan is at least the critical path and at least the busy time of every lane."""
    spans = run_tasks(tasks)
    end = _end(spans)
    assert end >= _longest_chain_ns(tasks)
    for lane in {task.lane for task in tasks}:
        assert end >= sum(task.duration_ns for task in tasks if task.lane == lane)
    for task, span in zip(tasks, spans, strict=True):
        assert span.duration_ns == task.duration_ns


@given(sim_tasks, slowdowns)
def test_slowing_stretches_within_its_factor(tasks: list[SimTask], slowdown: dict) -> None:
    """A task takes at least its duration and at most that times its lane's slowdown."""
    for task, span in zip(tasks, run_tasks(tasks, slowdown), strict=True):
        most = task.duration_ns * slowdown.get(task.lane, 1.0)
        assert task.duration_ns - 1 <= span.duration_ns <= most + 1


@given(sim_tasks, slowdowns)
def test_the_clock_is_deterministic(tasks: list[SimTask], slowdown: dict) -> None:
    """The same tasks give the same spans, bit by bit."""
    assert run_tasks(tasks, slowdown) == run_tasks(tasks, slowdown)


@given(sim_tasks, st.integers(1, 10))
def test_more_bandwidth_never_slows_a_fixed_schedule(tasks: list[SimTask], factor: int) -> None:
    """Dividing the durations of one in-order lane never delays the end."""
    fixed = [t for t in tasks if t.lane not in READY_ORDER_LANES]
    faster = [
        SimTask(
            name=t.name,
            lane=t.lane,
            duration_ns=t.duration_ns // factor if t.lane == "communication" else t.duration_ns,
            reads=t.reads,
            writes=t.writes,
            release_ns=t.release_ns,
        )
        for t in fixed
    ]
    assert _end(run_tasks(faster)) <= _end(run_tasks(fixed))


def test_hazards_as_in_the_engine() -> None:
    """Reads after a write wait, a write waits for reads and for writes, reads run side by side."""
    tasks = [
        _task("w", "compute", 10, writes=("x",)),
        _task("r1", "host", 5, reads=("x",)),
        _task("r2", "communication", 7, reads=("x",)),
        _task("w2", "disk", 1, writes=("x",)),
        _task("free", "loader", 3, writes=("y",)),
    ]
    assert dependencies(tasks) == [[], [0], [0], [0, 1, 2], []]
    times = {s.name: (s.start_ns, s.end_ns) for s in run_tasks(tasks)}
    assert times == {"w": (0, 10), "r1": (10, 15), "r2": (10, 17), "w2": (17, 18), "free": (0, 3)}


def test_priority_lanes_take_the_ready_task_of_highest_priority() -> None:
    """The loader runs by priority among what is ready, then in order of issue."""
    tasks = [
        _task("maker", "host", 3, writes=("x",)),
        _task("first", "loader", 2),
        _task("low", "loader", 2),
        _task("high", "loader", 2, priority=5),
        _task("late", "loader", 2, reads=("x",), priority=9),
    ]
    names = sorted(run_tasks(tasks), key=lambda s: s.start_ns)
    assert [s.name for s in names if s.lane == "loader"] == ["high", "first", "late", "low"]


def test_contention_in_two_phases() -> None:
    """While both are active each runs at 1/slowdown; what is left of the longer runs at full rate."""
    tasks = [_task("compute", "compute", 1000), _task("reduce", "communication", 300)]
    compute, reduce = run_tasks(tasks, {"compute": 1.25, "communication": 2.0})
    assert (reduce.start_ns, reduce.end_ns) == (0, 600)
    # In 600 ns computing does 600 / 1.25 = 480; 520 are left.
    assert (compute.start_ns, compute.end_ns) == (0, 1120)


def test_contention_begins_in_the_middle_of_a_task() -> None:
    """A task that is joined half-way is slowed only from there on."""
    tasks = [
        _task("a", "compute", 100, writes=("x",)),
        _task("b", "compute", 200),
        _task("reduce", "communication", 50, reads=("x",)),
    ]
    a, b, reduce = run_tasks(tasks, {"compute": 2.0, "communication": 1.0})
    assert (a.end_ns, reduce.start_ns, reduce.end_ns) == (100, 100, 150)
    assert b.end_ns == 150 + 175


def test_a_released_task_holds_its_lane_back() -> None:
    """A lane in order waits for the release of its head."""
    spans = run_tasks([_task("a", "host", 5, release_ns=10), _task("b", "host", 5)])
    assert [(s.start_ns, s.end_ns) for s in spans] == [(10, 15), (15, 20)]


def test_nothing_to_run() -> None:
    """No tasks, no spans."""
    assert run_tasks([]) == ()


def test_slowdown_of_a_single_lane_means_nothing() -> None:
    """One lane alone has nobody to be slowed by."""
    assert run_tasks([_task("a", "compute", 10)], {"compute": 3.0})[0].end_ns == pytest.approx(10)


def test_a_task_may_hinder_in_its_own_way() -> None:
    """Its slowdown holds while it runs, that of the others before and after it."""
    own = {"compute": 2.0, "communication": 4.0}
    tasks = [
        _task("compute", "compute", 1000),
        _task("encode", "communication", 50, writes=("x",), slowdown=own),
        _task("reduce", "communication", 100, writes=("x",)),
    ]
    compute, encode, reduce = run_tasks(tasks, {"compute": 1.25, "communication": 1.0})
    assert (encode.end_ns, reduce.end_ns) == (200, 300)
    # Computing gets 100 done beside the first and 80 beside the second.
    assert compute.end_ns == 300 + 1000 - 180
    free = run_tasks(tasks)
    assert free[1].end_ns == 200
    assert free[0].end_ns == 1000 + 100


def _longest_chain_ns(tasks: list[SimTask]) -> int:
    ends: list[int] = []
    for task, waits in zip(tasks, dependencies(tasks), strict=True):
        start = max((ends[index] for index in waits), default=0)
        ends.append(max(start, task.release_ns) + task.duration_ns)
    return max(ends, default=0)
