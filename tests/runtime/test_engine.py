"""The engine: the result is that of running everything in push order, one by one."""

import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine import Engine
from ridgeline.engine.lanes.lanes import WorkLane
from ridgeline.errors import EngineError

LANES = ("host", "compute", "loader", "disk", "copy-in", "communication")

tasks = st.lists(
    st.tuples(
        st.sampled_from(LANES),
        st.lists(st.integers(0, 5), max_size=3),
        st.integers(0, 5),
        st.integers(0, 3),
    ),
    max_size=60,
)


def run_serially(program: list[tuple[str, list[int], int, int]]) -> list[int]:
    data = [1] * 6
    for number, (_, reads, write, _) in enumerate(program):
        data[write] = (31 * sum(data[r] for r in reads) + 7 * data[write] + number) % 10007
    return data


@given(tasks, st.integers(1, 8))
def test_any_program_gives_the_serial_result(
    program: list[tuple[str, list[int], int, int]], max_pending: int
) -> None:
    """Random reads, writes, lanes and priorities: the data equal those of serial execution."""
    data = [1] * 6
    with Engine(max_pending=max_pending) as engine:
        variables = [engine.variable(str(i)) for i in range(6)]
        for number, (lane, reads, write, priority) in enumerate(program):

            def work(reads: list[int] = reads, write: int = write, number: int = number) -> None:
                data[write] = (31 * sum(data[r] for r in reads) + 7 * data[write] + number) % 10007

            engine.push(
                work,
                reads=[variables[r] for r in reads],
                writes=[variables[write]],
                lane=lane,
                priority=priority,
            )
        engine.wait_all()
        assert [v.version for v in variables] == [
            sum(write == i for _, _, write, _ in program) for i in range(6)
        ]
    assert data == run_serially(program)


def test_readers_run_side_by_side() -> None:
    """Two readers of one variable on two lanes meet; a serial engine would hang at the barrier."""
    barrier = threading.Barrier(2, timeout=30)
    with Engine() as engine:
        shared = engine.variable("shared")
        engine.push(barrier.wait, reads=(shared,), lane="loader")
        engine.push(barrier.wait, reads=(shared,), lane="disk")
        engine.wait_all()


def test_a_failed_task_poisons_what_it_writes() -> None:
    """Tasks after it are skipped; every wait raises, naming the task, the lane and the pushing line."""
    ran: list[int] = []

    def fail() -> None:
        raise OSError("no room")

    with Engine() as engine:
        first, second = engine.variable("first"), engine.variable("second")
        engine.push(fail, writes=(first,), lane="disk", name="checkpoint")
        engine.push(lambda: ran.append(1), reads=(first,), writes=(second,), lane="loader")
        for _ in range(2):
            with pytest.raises(
                EngineError,
                match=r"^OSError: no room \(in task 'checkpoint' on lane disk, pushed at .*test_engine.py:\d+\)$",
            ):
                engine.wait(second)
    assert ran == []


def test_an_error_nobody_waited_for_is_raised_at_the_end() -> None:
    """Leaving the engine tells of a failure that nobody asked about."""
    with pytest.raises(EngineError, match="ZeroDivisionError"), Engine() as engine:
        engine.push(lambda: 1 // 0, writes=(engine.variable(),), lane="loader")


def test_unknown_lane_and_closed_engine_are_refused() -> None:
    """Messages say what was wanted, got, where, and what next."""
    engine = Engine()
    with pytest.raises(EngineError, match=r"wanted a lane of .* got 'gpu' for work; use one"):
        engine.push(lambda: None, lane="gpu", name="work")  # type: ignore[arg-type]
    engine.close()
    with pytest.raises(
        EngineError, match=r"wanted an open engine for task 'late' \(.*test_engine.py:\d+\)"
    ):
        engine.push(lambda: None, name="late")
    with pytest.raises(EngineError, match="wanted max_pending >= 1, got 0"):
        Engine(max_pending=0)


def test_pushes_block_at_the_bound() -> None:
    """No more than max_pending tasks are unfinished at any time."""
    seen: list[int] = []
    gate = threading.Event()
    with Engine(max_pending=2) as engine:
        line = engine.variable("line")
        engine.push(lambda: gate.wait(30), writes=(line,), lane="loader")
        engine.push(lambda: None, writes=(line,), lane="loader")
        blocked = threading.Thread(
            target=lambda: (
                engine.push(lambda: None, writes=(line,), lane="loader"),
                seen.append(1),
            )
        )
        blocked.start()
        blocked.join(0.05)
        assert seen == []
        gate.set()
        blocked.join(30)
        assert seen == [1]


def test_asynchronous_work_starts_in_push_order() -> None:
    """On a lane of collectives a task that is ready early waits for those pushed before it."""
    started: list[str] = []
    futures: list[Any] = []

    def start(name: str) -> Any:
        started.append(name)
        futures.append(torch.futures.Future())
        return futures[-1]

    gate = threading.Event()
    with Engine(lanes={"communication": WorkLane}) as engine:
        first, second = engine.variable("first"), engine.variable("second")
        engine.push(lambda: gate.wait(30), writes=(first,), lane="loader")
        engine.push(lambda: start("a"), writes=(first,), lane="communication")
        engine.push(lambda: start("b"), writes=(second,), lane="communication")
        assert started == []
        gate.set()
        while len(futures) < 2:
            threading.Event().wait(0.001)
        assert started == ["a", "b"]
        for future in futures:
            future.set_result(None)
        engine.wait(first)
        engine.wait(second)


def test_the_timeline_has_a_span_for_every_task() -> None:
    """Spans carry name and lane, and tasks on one variable do not overlap."""
    with Engine() as engine:
        v = engine.variable("v")
        for name in ("a", "b", "c"):
            engine.push(lambda: None, writes=(v,), lane="loader", name=name)
        engine.wait(v)
        spans = sorted(engine.timeline().spans, key=lambda s: s.start_ns)
    assert [s.name for s in spans] == ["a", "b", "c"]
    assert all(x.end_ns <= y.start_ns for x, y in itertools.pairwise(spans))
