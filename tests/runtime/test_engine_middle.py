"""A signal handler or finalizer may use an engine at any step of its work: pushes are made, waits end or are refused."""

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from ridgeline.engine import Engine, Variable
from ridgeline.engine.lanes.lanes import WorkLane
from ridgeline.errors import EngineError

LANES = ("loader", "host", "disk", "communication", "copy-in")


def done_future() -> Any:
    future: Any = torch.futures.Future()
    future.set_result(None)
    return future


class Caller:
    """Calls something once, at the given one of the calls that the engine makes, in this thread.

    Python calls signal handlers and finalizers between two steps of a thread, as it calls a profiler: at the
    beginning and the end of every call, those of C included.
    """

    def __init__(self, moment: int, call: Callable[[], object]) -> None:
        self._left = moment
        self._call = call
        self.has_called = False

    def __enter__(self) -> None:
        sys.setprofile(self._step)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _step(self, frame: Any, event: str, argument: Any) -> None:
        if "ridgeline/engine" in frame.f_code.co_filename:
            self._left -= 1
            if not self._left:
                sys.setprofile(None)
                self.has_called = True
                self._call()


def work(engine: Engine, variables: list[Variable], ran: list[int]) -> None:
    """Pushes on lanes of all kinds that read and write each other's variables, some behind others."""
    for number in range(8):
        lane = ("loader", "host", "communication", "disk")[number % 4]
        engine.push(
            lambda number=number, lane=lane: (
                ran.append(number) or (done_future() if lane == "communication" else None)
            ),
            reads=[variables[(number + 1) % 3]],
            writes=[variables[number % 3]],
            lane=lane,
            num_bytes=number % 2,
            priority=number % 5 // 4,
        )
    engine.clear_error(variables[0])
    engine.wait(variables[1])


def called_at_every_moment(
    call: Callable[[Engine, list[Variable]], object], check: Callable[[], object]
) -> int:
    """Have it called at one moment of a program after the other; how many there were."""
    moment = 0
    while True:
        moment += 1 + moment % 3
        ran: list[int] = []
        lanes = {"communication": WorkLane}
        with Engine(threads={"disk": 2}, lanes=lanes, max_pending=4) as engine:
            variables = [engine.variable(str(index)) for index in range(3)]
            caller = Caller(moment, partial(call, engine, variables))
            with caller:
                work(engine, variables, ran)
            engine.wait_all()
            assert engine.statistics().pending == 0
            assert sorted(ran) == list(range(8))
        check()
        if not caller.has_called:
            return moment


@pytest.mark.parametrize("lane", LANES)
def test_a_push_at_any_moment_is_made_once(lane: str) -> None:
    """Whatever its lane, also one that is not made yet; several of one call in their order, and before what follows."""
    ran: list[int] = []

    def push(engine: Engine, variables: list[Variable]) -> None:
        for number in range(3):
            engine.push(
                lambda number=number: (
                    ran.append(number) or (done_future() if lane == "communication" else None)
                ),
                reads=[variables[0]],
                writes=[variables[2]],
                lane=lane,
            )

    def check() -> None:
        assert ran in ([], [0, 1, 2])
        ran.clear()

    assert called_at_every_moment(push, check) > 300


@pytest.mark.parametrize(
    "what", ["wait", "wait_all", "end_batch", "cancel", "statistics", "delete"]
)
def test_what_waits_at_any_moment_ends_or_is_refused(what: str) -> None:
    """It is never left asleep, and what it came in the middle of goes on."""
    told: set[str] = set()

    def use(engine: Engine, variables: list[Variable]) -> None:
        try:
            if what == "wait":
                for variable in variables:
                    engine.wait(variable)
            elif what == "cancel":
                engine.cancel(engine.push(lambda: None, lane="copy-in"))
            elif what == "delete":
                engine.delete(engine.variable())
            else:
                getattr(engine, what)()
        except EngineError as error:
            told.add(str(error))

    called_at_every_moment(use, lambda: None)
    refusal = (
        f"wanted {what}() outside of the engine's own work, got it in a signal handler or finalizer that Python called "
        "while this thread pushes a task or ends one, which would be waited for; push a task that reads what is awaited"
    )
    # In the function of a task it is that of the task, as everywhere.
    inside = (
        "wanted a wait for what others write, got '",
        f"wanted {what}() outside of the engine's tasks, got it in '<lambda>'",
    )
    assert all(text == refusal or text.startswith(inside) for text in told)
    assert (refusal in told) == (what in ("wait", "wait_all", "end_batch", "cancel"))


class Pair:
    """Two engines whose tasks meet before each uses the other engine."""

    def __init__(self, **bounds: int) -> None:
        self.engines = Engine(**bounds), Engine(**bounds)
        self.variables = [
            engine.variable(name) for engine, name in zip(self.engines, "ab", strict=True)
        ]
        self._meeting = threading.Barrier(2)

    def run(self, use: Callable[[Engine, Variable], object]) -> list[str]:
        """Have each task use the other engine; the errors that its variables have then."""
        (first, second), (a, b) = self.engines, self.variables
        first.push(
            lambda: (self._meeting.wait(), use(second, b)), writes=(a,), lane="loader", name="A"
        )
        second.push(
            lambda: (self._meeting.wait(), use(first, a)), writes=(b,), lane="loader", name="B"
        )
        told = []
        for engine, variable in zip(self.engines, self.variables, strict=True):
            try:
                engine.wait(variable)
            except EngineError as error:
                told.append(str(error))
        for engine in self.engines:
            with suppress(EngineError):  # of a task that only pushed on
                engine.close()
        return told


def wait_all(engine: Engine, _: Variable) -> None:
    engine.wait_all()


def close(engine: Engine, _: Variable) -> None:
    engine.close()


def end_batches(engine: Engine, variable: Variable) -> None:
    for _ in range(2):
        engine.end_batch()
        engine.push(lambda: None, writes=(variable,), lane="loader")
    engine.end_batch()


@pytest.mark.parametrize("use", [wait_all, close, end_batches])
def test_engines_whose_tasks_wait_for_the_end_of_each_other_are_refused(use: Any) -> None:
    """One of the two is told who waits for whom; the other goes on, or has what that raised."""
    told = Pair(max_batches=1).run(use)
    assert told
    assert "which would wait for itself: 'A' on lane loader waits for " in " ".join(
        told
    ) or "which would wait for itself: 'B' on lane loader waits for " in " ".join(told)


def test_engines_whose_tasks_want_room_in_each_other_have_it() -> None:
    """Beyond their bounds: a push that waited for room would wait for itself."""
    ran: list[int] = []

    def push(engine: Engine, _: Variable) -> None:
        engine.push(lambda: ran.append(1), lane="loader")

    assert Pair(max_pending=1).run(push) == []
    assert ran == [1, 1]
