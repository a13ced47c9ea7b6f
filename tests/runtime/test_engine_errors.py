"""What the engine tells of failures: both tracebacks, at every wait, and the rest goes on."""

import os
import signal
import sys
import threading
import traceback
import warnings

import pytest

from ridgeline.engine import Engine
from ridgeline.errors import EngineError


def fail() -> None:
    raise OSError("no room")


def test_the_error_shows_both_tracebacks() -> None:
    """The chained error has the task's frames; its notes have the stack of the push."""

    def pushing_helper(engine: Engine) -> None:
        engine.push(fail, writes=(broken,), lane="disk")

    with Engine() as engine:
        broken = engine.variable("broken")
        pushing_helper(engine)
        with pytest.raises(EngineError) as caught:
            engine.wait(broken)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)][-1] == "fail"
    notes = "\n".join(cause.__notes__)
    assert "in pushing_helper\n    engine.push(fail, writes=(broken,)" in notes
    assert "in test_the_error_shows_both_tracebacks\n    pushing_helper(engine)" in notes


def test_the_rest_goes_on() -> None:
    """A failure touches nothing that does not depend on it."""
    with Engine() as engine:
        broken, sound = engine.variable(), engine.variable()
        engine.push(fail, writes=(broken,), lane="loader")
        engine.push(int, writes=(sound,), lane="loader")
        engine.wait(sound)
        with pytest.raises(EngineError, match="OSError"):
            engine.wait(broken)
        assert engine.statistics().done == 1


def test_clear_error_mends_what_is_pushed_later() -> None:
    """Tasks pushed before the clearing are skipped, tasks after it run; no wait raises any more."""
    ran: list[str] = []
    gate = threading.Event()
    with Engine() as engine:
        v = engine.variable()
        engine.push(lambda: gate.wait(30) and fail(), writes=(v,), lane="disk")
        engine.push(lambda: ran.append("before"), reads=(v,), lane="loader")
        engine.clear_error(v)
        engine.push(lambda: ran.append("after"), reads=(v,), lane="loader")
        gate.set()
        engine.wait(v)
        with pytest.raises(EngineError, match="OSError"):
            engine.wait_all()
        assert v.version == 2
    assert ran == ["after"]


def test_wait_all_tells_what_no_wait_has_told() -> None:
    """Once, and with the number of further failures; close and end_batch do the same."""
    engine = Engine()
    told = engine.variable()
    engine.push(fail, writes=(told,), lane="loader")
    with pytest.raises(EngineError):
        engine.wait(told)
    engine.wait_all()
    engine.push(fail, lane="loader")
    engine.push(fail, lane="loader", name="other")
    with pytest.raises(EngineError, match=r"in task 'fail' .*\); 1 other task failed as well$"):
        engine.wait_all()
    engine.wait_all()
    engine.push(fail, lane="host")
    with pytest.raises(EngineError, match="OSError: no room"):
        engine.end_batch()
    engine.push(fail, lane="loader")
    with pytest.raises(EngineError, match="OSError: no room"):
        engine.close()
    engine.close()


def test_leaving_by_an_error_joins_the_threads_and_keeps_the_error() -> None:
    """The error on its way is not replaced; what was pending is finished, no thread stays."""
    done: list[int] = []

    def leave_by_an_interrupt() -> None:
        with Engine() as engine:
            engine.push(fail, lane="loader")
            engine.push(lambda: done.append(1), lane="loader")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave_by_an_interrupt()
    assert done == [1]


def test_an_interrupted_task_is_over() -> None:
    """A KeyboardInterrupt in a task of the pushing thread goes on to it, and locks nothing."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    engine = Engine()
    v = engine.variable()
    with pytest.raises(KeyboardInterrupt):
        engine.push(interrupt, writes=(v,))
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        engine.wait(v)
    engine.close()


def test_an_interrupted_push_leaves_a_cancelled_task() -> None:
    """Ctrl-C while a push waits for its turn: what it would have written is poisoned, nothing hangs."""
    main = threading.get_ident()
    seen: list[int] = []

    def interrupt() -> None:
        while len(seen) < 3:  # a few times in a row, to be sure that the push sleeps
            threading.Event().wait(0.005)
            frame = sys._current_frames()[main]
            seen.append(1) if frame.f_code.co_name == "_pass_gate" else seen.clear()
        signal.pthread_kill(main, signal.SIGINT)

    with Engine() as engine:
        v = engine.variable()
        engine.push(interrupt, writes=(v,), lane="loader")
        with pytest.raises(KeyboardInterrupt):
            engine.push(int, writes=(v,), lane="host")
        with pytest.raises(
            EngineError, match=r"CancelledError: cancelled before it began \(in task 'int'"
        ):
            engine.wait(v)


def test_a_thread_survives_a_task_that_exits() -> None:
    """SystemExit in a worker poisons like any error; the lane goes on."""
    with Engine() as engine:
        v = engine.variable()
        engine.push(lambda: exit(3), writes=(v,), lane="loader", name="leaver")
        with pytest.raises(EngineError, match=r"SystemExit: 3 \(in task 'leaver'"):
            engine.wait(v)
        engine.push(int, lane="loader")
        engine.wait_all()


def test_a_forked_child_is_refused() -> None:
    """The child's copy has no threads: use raises at once, close and exit return."""
    with Engine() as engine:
        v = engine.variable()
        engine.push(int, writes=(v,), lane="loader")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
            child = os.fork()
        if not child:
            status = 1
            try:
                engine.push(int)
            except EngineError as error:
                told = (
                    f"wanted push in process {os.getppid()}, which made the engine, got its forked"
                )
                engine.close()
                status = 0 if str(error).startswith(told) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.wait(v)


def test_waits_that_would_never_end_are_refused() -> None:
    """A task cannot wait for itself, by variable, by wait_all or by close."""
    with Engine() as engine:
        v = engine.variable("mine")
        for call, said in (
            (lambda: engine.wait(v), "got 'mine', which the waiting task '<lambda>' itself writes"),
            (
                engine.wait_all,
                r"wanted wait_all\(\) outside of the engine's tasks, got it in 'wait_all'",
            ),
            (engine.close, r"wanted close\(\) outside of the engine's tasks, got it in 'close'"),
        ):
            engine.push(call, writes=(v,), lane="loader")
            with pytest.raises(EngineError, match=said):
                engine.wait(v)
            engine.clear_error(v)
