"""A wait of a task that cannot end says who waits for whom; any other is let be."""

import os
import threading
import warnings
from typing import Any

import pytest

from ridgeline.engine import Engine
from ridgeline.engine.safety import waiting
from ridgeline.errors import EngineError


def test_a_task_that_waits_for_its_own_lane_is_told_so() -> None:
    """The task that it waits for comes after it on the same thread: the message names both."""
    with Engine() as engine:
        result = engine.variable("result")

        def outer() -> None:
            engine.push(int, writes=(result,), lane="loader", name="inner")
            engine.wait(result)

        engine.push(outer, lane="loader", name="outer")
        with pytest.raises(EngineError) as caught:
            engine.wait_all()
        assert str(caught.value.__cause__) == (
            "wanted a wait that can end, got 'result' in task 'outer', which would wait for itself: "
            "'outer' on lane loader waits for variable 'result', written by 'inner'; "
            "'inner' on lane loader waits for its lane, where there runs 'outer'; "
            "push a task that reads 'result' instead of waiting, or give the lane more threads"
        )
        engine.wait(result)
        assert result.version == 1


def test_with_a_second_thread_a_task_may_wait_for_its_own_lane() -> None:
    """As the message says."""
    with Engine(threads={"loader": 2}) as engine:
        result = engine.variable("result")

        def outer() -> None:
            engine.push(int, writes=(result,), lane="loader", name="inner")
            engine.wait(result)

        engine.push(outer, lane="loader", name="outer")
        engine.wait_all()


def test_tasks_that_wait_for_each_other_are_told_so() -> None:
    """Whichever comes last raises; the other one ends."""
    both = threading.Barrier(2, timeout=30)
    with Engine() as engine:
        a, b = engine.variable("a"), engine.variable("b")
        made = threading.Event()

        def wait(variable: Any) -> None:
            made.wait(30)
            both.wait()
            engine.wait(variable)

        engine.push(lambda: wait(b), writes=(a,), lane="loader", name="first")
        engine.push(lambda: wait(a), writes=(b,), lane="disk", name="second")
        made.set()
        with pytest.raises(
            EngineError,
            match=r"'first' on lane loader waits for variable 'b', written by 'second'.*"
            r"|'second' on lane disk waits for variable 'a', written by 'first'",
        ):
            engine.wait_all()
        assert engine.statistics().failed in (1, 2)


def test_a_reader_that_waits_for_a_later_write_is_told_so() -> None:
    """The write waits for the reader to be through."""
    with Engine() as engine:
        v = engine.variable("v")
        may_wait = threading.Event()
        engine.push(
            lambda: may_wait.wait(30) and engine.wait(v), reads=(v,), lane="disk", name="reader"
        )
        engine.push(int, writes=(v,), lane="loader", name="writer")
        may_wait.set()
        with pytest.raises(
            EngineError, match="'writer' on lane loader waits for variable 'v', used by 'reader'"
        ):
            engine.wait_all()


def test_waits_of_tasks_that_can_end_are_let_be() -> None:
    """Chains over several lanes, none of which closes."""
    ended: list[int] = []
    with Engine() as engine:
        chain = [engine.variable(str(index)) for index in range(4)]

        def work(index: int) -> None:
            if index:
                engine.wait(chain[index - 1])
            ended.append(index)

        for index, lane in enumerate(("loader", "disk", "copy-in", "copy-out")):
            engine.push(lambda index=index: work(index), writes=(chain[index],), lane=lane)
        engine.wait_all()
    assert ended == [0, 1, 2, 3]


def test_a_lane_whose_other_thread_will_be_free_is_no_circle() -> None:
    """One of two threads waits for a task that waits for a thread: the other thread takes it."""
    is_busy, is_over = threading.Event(), threading.Event()
    with Engine(threads={"loader": 2}) as engine:
        result = engine.variable("result")

        def busy() -> None:
            is_busy.set()
            while not (waiting._blocked or is_over.is_set()):
                is_over.wait(0.001)

        def outer() -> None:
            engine.push(int, writes=(result,), lane="loader", name="inner")
            try:
                engine.wait(result)
            finally:
                is_over.set()

        engine.push(busy, lane="loader", name="busy")
        is_busy.wait(30)
        engine.push(outer, lane="loader", name="outer")
        engine.wait_all()


@pytest.mark.parametrize("lane", ["host", "loader"])
def test_a_task_that_waits_for_the_one_it_runs_in_is_told_so(lane: str) -> None:
    """A push inside a task runs there at once: it cannot wait for what that task writes."""
    with Engine() as engine:
        v = engine.variable("v")

        def outer() -> None:
            engine.push(lambda: engine.wait(v), name="inner")

        engine.push(outer, writes=(v,), lane=lane, name="outer")
        with pytest.raises(
            EngineError,
            match=rf"'outer' on lane {lane} waits for the end of its function, in which there runs 'inner'",
        ):
            engine.wait_all()


def test_a_task_may_wait_for_what_it_pushed_wherever_it_runs() -> None:
    """Also where the thread that ended another task came to run it."""
    ran: list[int] = []
    with Engine() as engine:
        first = engine.variable()

        def second() -> None:
            b, c = engine.variable(), engine.variable()
            engine.push(
                lambda: engine.push(lambda: ran.append(1), reads=(b,)) and None, writes=(b,)
            )
            engine.push(lambda: ran.append(2), reads=(b,), writes=(c,))
            engine.wait(c)

        engine.push(lambda: engine.push(second, reads=(first,)) and None, writes=(first,))
        engine.wait_all()
    assert ran == [1, 2]


def test_tasks_of_engines_that_wait_for_each_other_are_told_so() -> None:
    """Three of them, in a circle."""
    engines = [Engine() for _ in range(3)]
    variables = [engine.variable(str(index)) for index, engine in enumerate(engines)]
    may_wait = threading.Event()

    def wait(index: int) -> None:
        may_wait.wait(30)
        engines[index].wait(variables[index])

    for index, engine in enumerate(engines):
        after = (index + 1) % 3
        engine.push(
            lambda after=after: wait(after),
            writes=(variables[index],),
            lane="disk",
            name=f"t{index}",
        )
    may_wait.set()
    told = []
    for engine in engines:
        try:
            engine.close()
        except EngineError as error:
            told.append(str(error))
    assert any("'t0' on lane disk waits for variable '1', written by 't1'" in text for text in told)


def test_tasks_of_two_engines_may_wait_for_each_others_ends() -> None:
    """In one direction at a time."""
    with Engine() as engine, Engine() as other:
        a, b = engine.variable(), other.variable()
        may_go = threading.Event()
        other.push(lambda: may_go.wait(30) and None, writes=(b,), lane="loader")
        engine.push(lambda: other.wait(b), writes=(a,), lane="loader")
        other.push(lambda: engine.wait(a), lane="disk")
        engine.push(lambda: other.wait(b), lane="disk")
        may_go.set()
        engine.wait_all()
        other.wait_all()


def test_a_task_inside_one_of_another_engine_is_still_inside() -> None:
    """It neither waits for its own end at the bound nor by `wait_all`, through whatever it was called."""
    ran: list[int] = []
    with Engine(max_pending=1) as engine, Engine() as other:

        def inner() -> None:
            engine.push(lambda: ran.append(1))
            with pytest.raises(
                EngineError, match=r"wanted wait_all\(\) outside of the engine's tasks"
            ):
                engine.wait_all()

        engine.push(lambda: other.push(inner) and None, lane="loader")
        engine.wait_all()
        other.wait_all()
    assert ran == [1]


def test_an_engine_used_in_a_task_of_another_keeps_its_own_order() -> None:
    """The deletion that a task of the inner engine pushes is done by that engine."""
    ran: list[int] = []
    with Engine() as engine, Engine() as other:
        a = engine.variable()

        def second() -> None:
            v = other.variable()
            other.push(lambda: other.delete(v), writes=(v,))
            other.push(lambda: ran.append(1))

        engine.push(lambda: engine.push(second, reads=(a,)) and None, writes=(a,))
        engine.wait_all()
        other.wait_all()
        assert ran == [1]
        assert (engine.statistics().done, other.statistics().done) == (2, 3)


def test_a_child_made_while_tasks_wait_has_waits_of_its_own() -> None:
    """Tasks of the parent's engine wait at the fork, and its lock is held; the child's new engine works."""
    may_go = threading.Event()
    with Engine() as engine:
        v = engine.variable()
        engine.push(lambda: may_go.wait(30), writes=(v,), lane="loader")
        engine.push(lambda: engine.wait(v), lane="disk")
        while not waiting._blocked:
            may_go.wait(0.001)
        with engine._scheduler.lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
            child = os.fork()
            if not child:
                os._exit(wait_in_a_task())
        may_go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def wait_in_a_task() -> int:
    """Failed tasks of a new engine: none."""
    with Engine() as engine:
        v = engine.variable()
        engine.push(lambda: threading.Event().wait(0.02), writes=(v,), lane="loader")
        engine.push(lambda: engine.wait(v), lane="disk")  # as a rule before that is over
        engine.wait_all()
        return engine.statistics().failed


def test_who_waited_for_a_write_sees_its_task_done() -> None:
    """At the moment at which the waiting thread is woken; it may look before the engine's lock is given back."""
    may_end, seen = threading.Event(), []

    class Gate:
        """Stands for the thread that waits: what it would see."""

        def locked(self) -> bool:
            return True

        def release(self) -> None:
            seen.append((task.is_done, task.stop_ns > 0))

    with Engine() as engine:
        result = engine.variable("result")
        task = engine.push(lambda: may_end.wait(30), writes=(result,), lane="loader", name="write")
        gate: Any = Gate()
        result.waiters.append((1, gate))
        may_end.set()
        engine.wait_all()
    assert seen == [(True, True)]
