"""Cancelling, deleting, pushing from tasks, bounds, batches, lanes, statistics."""

import gc
import threading
import weakref
from typing import Any

import pytest

from ridgeline.engine import Engine
from ridgeline.errors import EngineError


def test_a_cancelled_task_never_runs_and_poisons_what_it_would_have_written() -> None:
    """Whether it waits for variables or for its lane; a task that has begun cannot be cancelled."""
    ran: list[str] = []
    begun, gate = threading.Event(), threading.Event()
    with Engine() as engine:
        a, b, c = engine.variable(), engine.variable(), engine.variable()
        running = engine.push(lambda: begun.set() or gate.wait(30), writes=(a,), lane="loader")
        waiting = engine.push(lambda: ran.append("waiting"), reads=(a,), writes=(b,), lane="disk")
        ready = engine.push(lambda: ran.append("ready"), writes=(c,), lane="loader", name="ready")
        reader = engine.push(lambda: ran.append("reader"), reads=(a,), lane="disk")
        begun.wait(30)
        assert [engine.cancel(t) for t in (running, waiting, ready, reader)] == [
            False,
            True,
            True,
            True,
        ]
        assert not engine.cancel(waiting)
        gate.set()
        engine.wait(a)
        with pytest.raises(
            EngineError, match=r"^CancelledError: cancelled before it began \(in task 'ready'"
        ):
            engine.wait(c)
        engine.wait_all()  # who cancels knows; only waits for its variables tell
        assert engine.statistics().cancelled == 3
        assert not engine.cancel(running)
    assert ran == []


def test_a_deleted_variable_is_refused_but_what_was_pushed_runs() -> None:
    """Deletion waits its turn; later pushes, waits and deletions are refused."""
    ran: list[int] = []
    gate = threading.Event()
    with Engine() as engine:
        v = engine.variable("old")
        engine.push(lambda: gate.wait(30) and ran.append(1), writes=(v,), lane="loader")
        engine.push(lambda: ran.append(2), reads=(v,), lane="disk")
        engine.delete(v)
        gate.set()
        message = r"wanted a variable in use for '{}', got 'old', which was deleted; make a new one"
        with pytest.raises(EngineError, match=message.format("late")):
            engine.push(int, reads=(v,), name="late")
        with pytest.raises(EngineError, match=message.format("wait")):
            engine.wait(v)
        with pytest.raises(EngineError, match=message.format("delete")):
            engine.delete(v)
    assert ran == [1, 2]
    assert v.version == 2


@pytest.mark.parametrize("lane", ["loader", "host", "compute:1"])
@pytest.mark.parametrize("serial", [False, True])
def test_a_task_may_push_more_than_the_bound(lane: str, serial: bool) -> None:
    """Nested pushes do not block; those that depend on the pushing task come after it."""
    ran: list[str] = []
    with Engine(max_pending=1, serial=serial) as engine:
        v = engine.variable()

        def outer() -> None:
            for number in range(5):
                engine.push(lambda n=number: ran.append(str(n)), writes=(v,), lane=lane)
            ran.append("outer")

        engine.push(outer, writes=(v,), lane="loader")
        engine.wait_all()
    assert ran == ["outer", "0", "1", "2", "3", "4"]


def test_a_long_chain_of_tasks_that_end_at_once_keeps_the_stack_flat() -> None:
    """5000 nested tasks of the pushing thread, and 5000 skipped ones: no recursion."""
    ran: list[int] = []
    with Engine(max_pending=10**6) as engine:
        v = engine.variable()

        def outer() -> None:
            for _ in range(5000):
                engine.push(lambda: ran.append(1), writes=(v,), lane="host")
            engine.push(lambda: 1 // 0, writes=(v,), lane="host")
            for _ in range(5000):
                engine.push(lambda: ran.append(2), writes=(v,), lane="host")

        engine.push(outer, writes=(v,), lane="loader")
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            engine.wait_all()
    assert ran == [1] * 5000


def test_bytes_are_bounded() -> None:
    """A producer without pause never has more than max_bytes alive; a larger task runs alone."""
    alive: set[int] = set()
    most = [0]

    class Payload:
        pass

    def make() -> Any:
        payload = Payload()
        alive.add(id(payload))
        weakref.finalize(payload, alive.discard, id(payload))
        most[0] = max(most[0], len(alive))
        return lambda: payload

    with Engine(max_bytes=1000) as engine:
        for _ in range(300):
            engine.push(make(), lane="loader", num_bytes=250)
        engine.push(int, lane="loader", num_bytes=5000)
        engine.push(int, lane="loader", num_bytes=1)
        engine.wait_all()
        statistics = engine.statistics()
    assert statistics.most_bytes == 5000
    assert most[0] <= 6  # four pending, the one that is offered, the one that just ended
    assert alive == set()


def test_end_batch_lets_the_work_be_two_batches_behind() -> None:
    """The third end of a batch blocks until the first batch is done."""
    gates = [threading.Event() for _ in range(4)]
    passed: list[int] = []

    def produce() -> None:
        for number, gate in enumerate(gates):
            engine.push(lambda g=gate: g.wait(30), lane="loader")
            engine.push(int, lane="loader")
            engine.end_batch()
            passed.append(number)

    with Engine() as engine:
        producer = threading.Thread(target=produce)
        producer.start()
        while producer.is_alive() and not engine._scheduler.pacing._batch_done:
            threading.Event().wait(0.001)
        assert passed == [0, 1]
        gates[0].set()
        while len(passed) < 3:
            threading.Event().wait(0.001)
        assert passed == [0, 1, 2]
        for gate in gates:
            gate.set()
        producer.join()
        assert engine.statistics().blocked_s > 0


def test_urgent_tasks_go_first() -> None:
    """Of what is ready, higher priority runs first; equal priorities in the order of readiness."""
    ran: list[int] = []
    gate = threading.Event()
    with Engine() as engine:
        engine.push(lambda: gate.wait(30), lane="loader")
        for priority in (0, -1, 2, 0, 2, -1):
            engine.push(lambda p=priority: ran.append(p), lane="loader", priority=priority)
        gate.set()
        engine.wait_all()
    assert ran == [2, 2, 0, 0, -1, -1]


def test_lanes_of_one_kind_are_threads_of_their_own() -> None:
    """`compute:0` and `compute:1` run side by side; so do the threads of one lane."""
    barrier = threading.Barrier(4, timeout=30)
    with Engine(threads={"compute": 2}) as engine:
        for lane in ("compute:0", "compute:1", "compute", "compute"):
            engine.push(barrier.wait, lane=lane)
        engine.wait_all()
        spans = engine.timeline().spans
    assert {span.lane for span in spans} == {"compute"}
    assert sorted(span.index for span in spans) == [0, 0, 1, 1]


@pytest.mark.parametrize("lane", ["gpu", "compute:", "compute:x", "compute:-1", "compute:1:2"])
def test_lanes_must_be_a_kind_or_an_indexed_kind(lane: str) -> None:
    """A misspelt lane is refused in push, in threads and in lanes."""
    said = "or one of them with an index such as 'copy-in:1', got "
    with Engine() as engine, pytest.raises(EngineError, match=said):
        engine.push(int, lane=lane)
    with pytest.raises(EngineError, match=said):
        Engine(threads={lane: 1})
    with pytest.raises(
        EngineError,
        match=r"wanted threads >= 1, got 0 in Engine\(threads=\{'loader': ...\}\); raise it",
    ):
        Engine(threads={"loader": 0})


@pytest.mark.parametrize("given", ["variable", ["name"], (1,)])
def test_only_sequences_of_variables_are_taken(given: Any) -> None:
    """A forgotten comma is a mistake that everybody makes; the engine goes on."""
    with Engine() as engine:
        wrong = engine.variable("loss") if given == "variable" else given
        for accesses in ({"reads": wrong}, {"writes": wrong}):
            with pytest.raises(
                EngineError,
                match=r"wanted a tuple or list of variables, got .* of 'step'; make them",
            ):
                engine.push(int, name="step", **accesses)
        engine.push(int, writes=[engine.variable()], lane="loader")


def test_statistics_count_what_became_of_the_tasks() -> None:
    """Pushed is the sum of the ends; the text names what there was."""
    with Engine() as engine:
        v = engine.variable()
        engine.push(int, writes=(v,), lane="loader")
        engine.push(lambda: 1 // 0, writes=(v,), lane="loader")
        engine.push(int, reads=(v,), lane="loader")
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            engine.wait_all()
    statistics = engine.statistics()
    assert (statistics.pushed, statistics.done, statistics.failed, statistics.skipped) == (
        3,
        1,
        1,
        1,
    )
    assert set(statistics.busy_s) == {"loader"}
    assert repr(statistics).startswith(
        "EngineStatistics(3 pushed, 1 done, 1 failed, 1 skipped; at most "
    )


def test_a_dropped_engine_finishes_and_ends_its_threads() -> None:
    """Nobody has to close it: what was pushed runs, and then no thread is left."""
    before = set(threading.enumerate())
    done: list[int] = []
    may_go = threading.Event()
    engine = Engine()
    engine.push(lambda: may_go.wait(30) and None, lane="loader")
    engine.push(lambda: done.append(1), lane="loader")
    engine.push(lambda: None, lane="disk")
    del engine
    gc.collect()
    may_go.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert done == [1]
    assert set(threading.enumerate()) <= before
