"""Where an engine would hang, fill the memory or lose work: it says so, or does not."""

import contextlib
import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import failing_tasks
import pytest
import torch

from ridgeline.engine import Engine
from ridgeline.engine.lanes.lanes import WorkLane
from ridgeline.errors import EngineError


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


def test_failing_tasks_of_all_kinds_are_accounted_for() -> None:
    """Waited for, deleted, cleared, read or left alone, on lanes of every kind; `failing_tasks.py` has a million."""
    counts = failing_tasks.run(4000)
    assert counts.are_right
    assert counts.failed == 4000
    assert counts.skipped == 1000


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
        with pytest.raises(
            EngineError, match="wanted a task of this engine to cancel, got EngineTask"
        ):
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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"threads": None}, "wanted threads by lane, got None in Engine(...); give a dict"),
        ({"lanes": 5}, "wanted lanes by lane, got 5 in Engine(...); give a dict"),
        (
            {"lanes": {"loader": 5}},
            "wanted a factory for lane 'loader', got 5 in Engine(lanes=...)",
        ),
    ],
)
def test_lanes_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    """By name."""
    with pytest.raises(EngineError) as caught:
        Engine(**given)
    assert str(caught.value).startswith(said)


def test_names_are_text() -> None:
    """Of tasks and of variables."""
    with Engine() as engine:
        with pytest.raises(EngineError, match=r"^wanted a name of type str, got 3 in push\(...\)"):
            engine.push(int, name=3)  # type: ignore[arg-type]
        with pytest.raises(
            EngineError, match=r"^wanted a name of type str, got b'v' in variable\("
        ):
            engine.variable(b"v")  # type: ignore[arg-type]
        assert engine.statistics().pushed == 0


def test_a_lane_whose_threads_cannot_be_started_refuses_the_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The threads that were started end, nothing is pending, and the lane works once there is room."""
    starts = iter([True, True, False])
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if not next(starts):
            raise RuntimeError("can't start new thread")
        start(thread)

    with Engine(threads={"loader": 3}) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", limited)
            with pytest.raises(
                EngineError, match="wanted 3 threads for lane 'loader', got can't start new thread"
            ):
                engine.push(int, lane="loader")
        assert engine.statistics().pushed == 0
        engine.push(int, lane="loader")
        engine.wait_all()


def test_a_closed_engine_starts_no_threads() -> None:
    """For a lane that was never used."""
    engine = Engine()
    engine.close()
    before = set(threading.enumerate())
    with pytest.raises(EngineError, match="got a closed one"):
        engine.push(int, lane="disk")
    assert set(threading.enumerate()) <= before


def test_an_exit_in_a_task_does_not_end_the_thread_that_came_to_run_it() -> None:
    """A task of the host lane, pushed by a task, runs in the loader's thread: that serves on."""
    may_go = threading.Event()
    ran: list[str] = []
    with Engine() as engine:
        v = engine.variable()

        def outer() -> None:
            engine.push(lambda: may_go.wait(30) and None, writes=(v,), lane="loader")
            engine.push(lambda: exit(3), reads=(v,), lane="host", name="leaver")
            engine.push(lambda: ran.append("host"), reads=(v,), lane="host")

        engine.push(outer)
        engine.push(lambda: ran.append("loader"), lane="loader")
        may_go.set()
        with pytest.raises(EngineError, match=r"SystemExit: 3 \(in task 'leaver'"):
            engine.wait_all()
    assert sorted(ran) == ["host", "loader"]


def test_what_is_no_future_fails_the_task_on_a_lane_of_collectives() -> None:
    """And the lane goes on."""
    with Engine(lanes={"communication": WorkLane}) as engine:
        engine.push(lambda: 5, lane="communication", name="step")
        with pytest.raises(EngineError, match="wanted a torch Future from task 'step' on lane"):
            engine.wait_all()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        engine.push(lambda: future, lane="communication")
        engine.wait_all()
