"""Nothing that a task does, holds or raises wedges the engine: whatever comes after it runs."""

import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from ridgeline.engine import Engine
from ridgeline.errors import EngineError


class OnEnd:
    """Calls something when nothing refers to it any more."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("cancels", [False, True])
def test_what_a_task_holds_may_use_the_engine_when_it_goes(fails: bool, cancels: bool) -> None:
    """It is dropped by the thread that ends the task, which holds no lock by then."""
    ran: list[int] = []
    may_run, is_over = threading.Event(), threading.Event()

    def end() -> None:
        engine.push(lambda: ran.append(engine.statistics().pushed), lane="loader")
        is_over.set()

    def work(holds: OnEnd) -> None:
        if fails:
            raise ValueError(f"broken, with {type(holds).__name__}")

    with Engine() as engine:
        variable = engine.variable()
        engine.push(may_run.wait, writes=(variable,), lane="loader")
        holds = OnEnd(end)
        task = engine.push(lambda holds=holds: work(holds), writes=(variable,), lane="loader")
        del holds
        if cancels:
            assert engine.cancel(task)
        del task
        may_run.set()
        engine.clear_error(variable)  # drops the error, and the frame that holds it
        with suppress(EngineError):
            engine.wait_all()
        gc.collect()  # an error refers to itself by the frames of its traceback
        is_over.wait()
        engine.wait_all()
    assert len(ran) == 1


class UnshowableError(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class UnnotedError(Exception):
    def add_note(self, _: str, /) -> None:
        raise RuntimeError("no notes")


class FrozenError(Exception):
    def __setattr__(self, *_: object) -> None:
        raise TypeError("frozen")


class OddlyNotedError(Exception):
    __notes__: Any = 7


class FalsyError(Exception):
    def __bool__(self) -> bool:
        return False


ODD = [
    UnshowableError,
    UnnotedError,
    FrozenError,
    OddlyNotedError,
    FalsyError,
    GeneratorExit,
    StopIteration,
]


@pytest.mark.parametrize("kind", ODD)
def test_an_error_of_any_class_is_told_and_ends_no_lane(kind: type[BaseException]) -> None:
    """Also one that refuses notes, attributes or text; more of them than are kept."""

    def fail() -> None:
        raise kind

    with Engine() as engine:
        for _ in range(20):
            variable, following = engine.variable(), engine.variable()
            engine.push(fail, writes=(variable,), lane="loader")
            engine.push(lambda: None, reads=(variable,), writes=(following,), lane="loader")
            for poisoned in (following, variable):
                with pytest.raises(EngineError, match=f"^{kind.__name__}: ") as caught:
                    engine.wait(poisoned)
                assert isinstance(caught.value.__cause__, kind)
        engine.wait_all()
        assert engine.statistics().failed == engine.statistics().skipped == 20


def test_the_text_of_an_error_that_has_none_says_so() -> None:
    """With the place of the push, whatever notes it brings."""

    def fail() -> None:
        error = UnshowableError()
        error.add_note("hint")
        raise error

    with Engine() as engine:
        variable = engine.variable()
        engine.push(fail, writes=(variable,), lane="loader")
        text = r"^UnshowableError: its text cannot be shown, as that raises RuntimeError \(in task 'fail' on lane loader, "
        with pytest.raises(EngineError, match=text):
            engine.wait(variable)


def send(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Have a thread raise, wherever it is next in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind)
    )


class SentError(BaseException):
    """From another thread."""


@pytest.mark.parametrize("priority", [0, 1])
def test_no_exception_that_another_thread_sends_ends_a_lane(priority: int) -> None:
    """As those that end what takes too long: wherever it strikes, what comes after runs, once and in order."""
    ran: list[int] = []
    with Engine() as engine:
        engine.push(lambda: None, lane="loader")
        engine.wait_all()
        lane = next(t for t in threading.enumerate() if t.name == "ridgeline-loader")
        for number in range(500):
            variable = engine.variable()
            engine.push(
                lambda number=number: ran.append(number),
                writes=(variable,),
                lane="loader",
                priority=priority,
            )
            send(lane, SentError)
            with suppress(EngineError):  # it struck in the task, or right before
                engine.wait(variable)
        with suppress(EngineError):
            engine.wait_all()
        assert lane.is_alive()
        assert engine.statistics().pending == 0
    assert ran == sorted(set(ran))


def test_an_exception_in_the_engines_own_code_fails_the_task_and_ends_no_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where no memory is left when a task ends."""
    with Engine() as engine:
        scheduler = engine._scheduler
        whole = scheduler._release
        left = [MemoryError("none left")]

        def release(*arguments: Any) -> Any:
            if left:
                raise left.pop()
            return whole(*arguments)

        monkeypatch.setattr(scheduler, "_release", release)
        first, second = engine.variable(), engine.variable()
        engine.push(lambda: None, writes=(first,), lane="loader")
        engine.push(lambda: None, reads=(first,), writes=(second,), lane="loader")
        engine.wait(second)
        engine.wait_all()
        assert engine.statistics().done == 2


async def waits() -> None:
    """Never awaited."""


def iterates() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(("fn", "kind"), [(waits, "coroutine"), (iterates, "generator")])
def test_a_function_that_only_makes_what_would_run_has_failed(
    fn: Callable[[], Any], kind: str
) -> None:
    """Nothing of it has run, and nothing would."""
    with Engine() as engine:
        variable = engine.variable()
        engine.push(fn, writes=(variable,), lane="loader")
        text = (
            f"^EngineError: wanted a function that does its work when it is called, got one that returned a {kind} of "
            f"which nothing has run, in task '{fn.__name__}'; push what iterates it, or asyncio.run of it "
        )
        with pytest.raises(EngineError, match=text):
            engine.wait(variable)


def test_what_a_factory_makes_has_to_be_a_lane() -> None:
    """It is refused where the engine is made."""
    make: Any = lambda _: None  # noqa: E731
    text = (
        r"^wanted a lane from the factory of 'communication', got None without runs_inline, enqueue, forget, start, "
        r"close in Engine\(lanes=...\); return a LaneRunner$"
    )
    with pytest.raises(EngineError, match=text):
        Engine(lanes={"communication": make})


def test_a_name_that_is_no_text_is_not_taken() -> None:
    """A function may have an attribute of that name that means something else."""

    class Work:
        __name__ = 5

        def __call__(self) -> None:
            """Nothing."""

    with Engine() as engine:
        assert engine.push(Work()).name == "Work"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [("pass", 0, ""), ("sys.exit(7)", 7, ""), ("1 / 0", 1, "ZeroDivisionError: division by zero")],
)
@pytest.mark.parametrize("lane", ["loader", "host"])
def test_a_child_that_a_task_forks_ends(lane: str, end: str, status: int, said: str) -> None:
    """On a lane with the task, whose thread is its only one; in the pushing thread it goes on there."""
    program = textwrap.dedent(f"""
        import os, sys
        from ridgeline.engine import Engine

        def fork():
            children.append(os.fork())
            if not children[0]:
                print("child", flush=True)
                {end}

        children = []
        engine = Engine()
        variable = engine.variable()
        engine.push(fork, writes=(variable,), lane="{lane}")
        if not children or not children[0] and {lane == "host"}:
            engine.close() if children else engine.wait(variable)
        if children[0]:
            engine.wait(variable)
            print("status", os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
    """)
    if lane == "host" and status == 1:
        status = 0  # the error is the variable's, for which nobody waits
        said = ""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert sorted(done.stdout.split("\n")[:2]) == ["child", f"status {status}"], done
    assert said in done.stderr
