"""Where an engine would hang, fill the memory or lose work: it says so, or does not."""

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.errors import EngineError
from ridgeline.runtime.engine import Engine


@pytest.mark.parametrize("lane", ["host", "compute"])
def test_nesting_until_the_stack_ends_is_an_error_and_the_engine_goes_on(lane: str) -> None:
    """A task that pushes a task that pushes a task, without end: RecursionError, told by `wait_all`."""
    depth = [0]
    with Engine() as engine:

        def nest() -> None:
            depth[0] += 1
            engine.push(nest, lane=lane)

        engine.push(nest, lane=lane)
        with pytest.raises(EngineError, match=r"^RecursionError: .* \(in task 'nest' on lane"):
            engine.wait_all()
        assert depth[0] > 20
        ran: list[int] = []
        variable = engine.variable()
        engine.push(lambda: ran.append(1), writes=(variable,), lane="loader")
        engine.wait(variable)
        engine.push(lambda: ran.append(2), lane=lane)
        assert ran == [1, 2]
        assert engine.statistics().pending == 0


def at_depth(frames: int, call: Callable[[], Any]) -> Any:
    return call() if frames == 0 else at_depth(frames - 1, call)


@pytest.mark.parametrize("lane", ["host", "loader"])
def test_a_push_at_any_depth_of_the_stack_leaves_the_engine_whole(lane: str) -> None:
    """Whichever call finds the stack full, every push is either refused or done, and counted once."""
    limit = sys.getrecursionlimit()
    with Engine() as engine:
        variable = engine.variable()
        for frames in range(limit - 120, limit):
            with contextlib.suppress(RecursionError):
                at_depth(frames, lambda: engine.push(int, writes=(variable,), reads=(), lane=lane))
        with contextlib.suppress(EngineError):
            engine.wait_all()
        engine.clear_error(variable)
        engine.wait(variable)
        assert engine.statistics().pending == 0


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


def test_a_forked_child_is_refused_whatever_was_locked() -> None:
    """Another thread holds the engine's locks at the fork: every call says whose engine it is."""
    with Engine() as engine:
        v = engine.variable()
        task = engine.push(int, writes=(v,), lane="loader")
        engine.wait(v)
        calls: list[Callable[[], Any]] = [
            engine.statistics,
            engine.timeline,
            engine.wait_all,
            engine.end_batch,
            lambda: engine.push(int, lane="disk"),
            lambda: engine.wait(v),
            lambda: engine.cancel(task),
            lambda: engine.delete(v),
            lambda: engine.clear_error(v),
        ]
        with engine._scheduler.lock, engine._scheduler.lanes._lock, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
            child = os.fork()
            if not child:
                os._exit(sum(not is_refused(call) for call in calls))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except EngineError as error:
        return "which made the engine, got its forked child" in str(error)
    return False


def test_failures_that_nobody_waits_for_take_no_memory() -> None:
    """Of 20,000 failures few are kept with their frames; all are counted and told."""

    class BrokenError(ValueError):
        pass

    raised: weakref.WeakSet[BrokenError] = weakref.WeakSet()

    def fail() -> None:
        error = BrokenError("broken")
        raised.add(error)
        raise error

    with Engine() as engine:
        for _ in range(20_000):
            engine.push(fail, lane="loader")
        engine._scheduler.drain()
        gc.collect()
        assert len(raised) <= 17  # the last one may still be in its thread
        with pytest.raises(
            EngineError,
            match=r"^BrokenError: broken \(in task 'fail' .*\); 19999 other tasks failed as well, of which "
            r"19984 were only counted; wait for variables, or more often, to see all$",
        ):
            engine.wait_all()


def test_a_failure_that_was_only_counted_is_told_once() -> None:
    """Waiting for its variable takes it from the count."""

    def fail() -> None:
        raise ValueError("broken")

    with Engine() as engine:
        variables = [engine.variable() for _ in range(20)]
        for variable in variables:
            engine.push(fail, writes=(variable,), lane="host")
        for variable in variables[15:]:
            with pytest.raises(EngineError, match="broken"):
                engine.wait(variable)
        with pytest.raises(EngineError, match=r"; 14 other tasks failed as well$"):
            engine.wait_all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_bytes": -5}, "wanted num_bytes >= 0, got -5 in push of 'step'; raise it"),
        (
            {"num_bytes": 1.5},
            "wanted num_bytes >= 0, got 1.5 in push of 'step'; give a whole number",
        ),
        (
            {"num_bytes": None},
            "wanted num_bytes >= 0, got None in push of 'step'; give a whole number",
        ),
        (
            {"priority": float("nan")},
            "wanted a whole number as priority, got nan in push of 'step'",
        ),
        ({"priority": "high"}, "wanted a whole number as priority, got 'high' in push of 'step'"),
        ({"lane": 3}, "wanted a lane of "),
        ({"lane": ["host"]}, "wanted a lane of "),
        ({"fn": None}, "wanted a function to run, got None in push(...)"),
        (
            {"reads": None},
            "wanted a tuple or list of variables, got None as reads or writes of 'step'",
        ),
    ],
)
def test_a_push_that_makes_no_sense_is_refused_before_anything_changes(
    given: dict[str, Any], said: str
) -> None:
    """By the name of what is wrong."""
    with Engine() as engine:
        v = engine.variable()
        with pytest.raises(EngineError) as caught:
            engine.push(**{"fn": int, "writes": (v,), "name": "step", "lane": "loader", **given})
        assert str(caught.value).startswith(said)
        assert engine.statistics().pushed == v.pushed_writes == 0
        engine.push(int, writes=(v,), lane="loader")


def test_what_belongs_to_another_engine_is_refused() -> None:
    """Its variables and its tasks."""
    with Engine() as engine, Engine() as other:
        theirs = other.variable("theirs")
        task = other.push(int, writes=(theirs,), lane="loader")
        told = (
            r"wanted a variable of this engine for '{}', got 'theirs' of another one; make it with"
        )
        for name, call in (
            ("step", lambda: engine.push(int, reads=(theirs,), name="step")),
            ("step", lambda: engine.push(int, writes=(theirs,), name="step")),
            ("wait", lambda: engine.wait(theirs)),
            ("delete", lambda: engine.delete(theirs)),
            ("clear_error", lambda: engine.clear_error(theirs)),
        ):
            with pytest.raises(EngineError, match=told.format(name)):
                call()
        with pytest.raises(EngineError, match="wanted a task of this engine to cancel, got Task"):
            engine.cancel(task)
        with pytest.raises(EngineError, match="wanted a variable for 'wait', got 'theirs'"):
            engine.wait("theirs")  # type: ignore[arg-type]
        assert engine.statistics().pushed == 0


@pytest.mark.parametrize("name", ["max_pending", "max_bytes", "max_batches"])
@pytest.mark.parametrize("value", [float("nan"), 2.5, "many", True])
def test_bounds_are_whole_numbers(name: str, value: Any) -> None:
    """Refused by name."""
    with pytest.raises(EngineError, match=rf"^wanted {name} >= 1, got .* in Engine\(...\); give"):
        Engine(**{name: value})


@pytest.mark.parametrize("drops", [False, True])
def test_what_is_pending_when_the_interpreter_ends_is_finished(tmp_path: Path, drops: bool) -> None:
    """Nobody closes the engine, kept or dropped: the file is whole, and a failure is printed."""
    program = textwrap.dedent(f"""
        import threading
        from ridgeline.runtime.engine import Engine

        engine = Engine()
        state = engine.variable()
        main = threading.main_thread()
        engine.push(lambda: main.join(), writes=(state,), lane="disk")
        for number in range(3):
            engine.push(
                lambda number=number: open("out", "a").write(str(number)), writes=(state,), lane="disk"
            )
        engine.push(lambda: 1 / 0, lane="loader", name="last")
        if {drops}:
            main.join = lambda: None
            del engine
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (tmp_path / "out").read_text() == "012"
    if not drops:
        assert "EngineError: ZeroDivisionError: division by zero (in task 'last'" in done.stderr


def test_collectives_that_are_pending_when_the_interpreter_ends_are_named() -> None:
    """They are not waited for, since their other workers may be gone."""
    program = textwrap.dedent("""
        import torch
        from ridgeline.runtime.engine import Engine
        from ridgeline.runtime.engine.lanes import WorkLane

        engine = Engine(lanes={"communication": WorkLane})
        engine.push(torch.futures.Future, lane="communication")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (
        "got one with 1 unfinished tasks and collectives among them, which are dropped"
        in done.stderr
    )
