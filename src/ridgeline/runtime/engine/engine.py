"""The engine: push functions with the variables they read and write; it runs them in order.

The result equals running everything in push order, one by one; what does not depend on each other
runs side by side on different lanes.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from ridgeline.errors import EngineError
from ridgeline.runtime.engine.lanes import InlineLane, LaneRunner, ThreadLane
from ridgeline.runtime.engine.variable import Task, Variable
from ridgeline.timeline import LANES, Lane, Span, Timeline

SPANS_KEPT = 100_000
"""Spans an engine remembers; older ones are dropped, so that a long run stays bounded in memory."""


class Engine:
    """Runs tasks on lanes in an order that respects the variables they read and write.

    Args:
        max_pending: Tasks that may be unfinished; a further push blocks. Keeps a fast producer from
            filling the memory.
        lanes: Factories of special lanes, each given the engine's finish callback. Other lanes are
            made when first used: `compute` and `host` run in the pushing thread, the rest in a
            thread each.

    Example:
        >>> with Engine() as engine:
        ...     total = engine.variable("total")
        ...     done = []
        ...     task = engine.push(lambda: done.append(1), writes=(total,), lane="loader")
        ...     engine.wait(total)
        >>> done
        [1]
    """

    def __init__(
        self,
        *,
        max_pending: int = 1024,
        lanes: Mapping[Lane, Callable[[Callable[..., None]], LaneRunner]] | None = None,
    ) -> None:
        if max_pending < 1:
            raise EngineError(
                f"wanted max_pending >= 1, got {max_pending} in Engine(...); raise it"
            )
        self._max_pending = max_pending
        self._changed = threading.Condition(threading.Lock())
        self._lanes: dict[Lane, LaneRunner] = {
            lane: make(self._finish) for lane, make in (lanes or {}).items()
        }
        self._pending = 0
        self._sequence = 0
        self._unraised: list[BaseException] = []
        self._is_closed = False
        self._begin_ns = time.perf_counter_ns()
        self._spans: deque[tuple[str, Lane, int, int]] = deque(maxlen=SPANS_KEPT)

    def variable(self, name: str = "") -> Variable:
        """A new variable; the name serves messages and reports."""
        return Variable(name or "variable")

    def push(
        self,
        fn: Callable[[], Any],
        reads: Sequence[Variable] = (),
        writes: Sequence[Variable] = (),
        *,
        lane: Lane = "host",
        name: str = "",
        priority: int = 0,
    ) -> Task:
        """Run `fn` on `lane` once everything pushed earlier that it depends on is done.

        A function that raises poisons the variables it writes: tasks that touch them are skipped,
        and `wait` raises the error.

        Args:
            fn: Called without arguments. On a `WorkLane` it returns a Future.
            reads: Variables read; may overlap with `writes`, which then counts.
            writes: Variables written.
            lane: Where it runs.
            name: Span name; default the function's name.
            priority: Higher runs first among the ready tasks of a thread lane.

        Raises:
            EngineError: the engine is closed or the lane is unknown.

        Cost: Blocks while `max_pending` tasks are unfinished; on `compute` and `host`, until done.
        """
        if lane not in LANES:
            raise EngineError(f"wanted a lane of {LANES}, got {lane!r} for {name or fn}; use one")
        written = tuple(dict.fromkeys(writes))
        read = tuple(variable for variable in dict.fromkeys(reads) if variable not in written)
        frame = sys._getframe(1)  # noqa: SLF001 - the cheap way to name the pushing line
        origin = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        task = Task(fn, read, written, lane, name or fn.__name__, priority, origin)
        runner = self._enter(task)
        if runner.runs_inline:
            with self._changed:
                self._changed.wait_for(lambda: task.waits == 0)
            self._start(task)
        return task

    def wait(self, variable: Variable) -> None:
        """Block until every write of `variable` pushed so far is done.

        A write on a stream lane is over for the host once enqueued; the caller's current stream is then
        made to wait for it, on the device.

        Raises:
            EngineError: a task that writes it failed; chained to what it raised. Raised once.
        """
        target = variable.pushed_writes
        with self._changed:
            self._changed.wait_for(lambda: variable.version >= target)
            error, variable.error = variable.error, None
        if variable.event is not None:
            variable.event.wait()
        if error is not None:
            self._raise(error)

    def wait_all(self) -> None:
        """Block until nothing is pending.

        Raises:
            EngineError: a task failed and nobody has been told yet.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0)
        if self._unraised:
            self._raise(self._unraised[0])

    def timeline(self, title: str = "engine") -> Timeline:
        """All finished tasks as spans, from the making of the engine."""
        spans = tuple(
            Span(name=name, lane=lane, start_ns=start, end_ns=end)
            for name, lane, start, end in list(self._spans)
        )
        end = max((span.end_ns for span in spans), default=0)
        return Timeline(origin="measured", title=title, workers=1, spans=spans, steps_ns=(end,))

    def close(self) -> None:
        """Finish what is pending and end the lanes' threads; further pushes are refused."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._pending == 0)
        for runner in self._lanes.values():
            runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; an error nobody waited for is raised, unless another is already on its way."""
        self.close()
        if error is None and self._unraised:
            self._raise(self._unraised[0])

    def _enter(self, task: Task) -> LaneRunner:
        with self._changed:
            if self._is_closed:
                raise EngineError(
                    f"wanted an open engine for task {task.name!r} ({task.origin}), got a closed one; "
                    "push before close() or make a new Engine"
                )
            self._changed.wait_for(lambda: self._pending < self._max_pending)
            runner = self._lanes.get(task.lane)
            if runner is None:
                inline = task.lane in ("compute", "host")
                runner = InlineLane(self._finish) if inline else ThreadLane(self._finish, task.lane)
                self._lanes[task.lane] = runner
            self._pending += 1
            self._sequence += 1
            task.sequence = self._sequence
            runner.enqueue(task)
            begun = sum(v.append(task, is_write=False) for v in task.reads)
            begun += sum(v.append(task, is_write=True) for v in task.writes)
            task.waits = len(task.reads) + len(task.writes) - begun
            is_ready = task.waits == 0
        if is_ready and not runner.runs_inline:
            self._start(task)
        return runner

    def _start(self, task: Task) -> None:
        inherited = next((v.error for v in (*task.reads, *task.writes) if v.error), None)
        if inherited is not None:
            task.error = inherited
            task.fn = _nothing
        task.start_ns = time.perf_counter_ns()
        self._lanes[task.lane].start(task)

    def _finish(self, task: Task, error: BaseException | None) -> None:
        task.stop_ns = time.perf_counter_ns()
        begin = self._begin_ns
        self._spans.append((task.name, task.lane, task.start_ns - begin, task.stop_ns - begin))
        ready: list[Task] = []
        with self._changed:
            if error is not None and task.error is None:
                error.add_note(
                    f"in task {task.name!r} on lane {task.lane}, pushed at {task.origin}"
                )
                task.error = error
                self._unraised.append(error)
            if task.error is not None:
                for variable in task.writes:
                    variable.error = task.error
            for variables, is_write in ((task.reads, False), (task.writes, True)):
                for variable in variables:
                    for begun in variable.release(is_write=is_write):
                        begun.waits -= 1
                        if begun.waits == 0:
                            ready.append(begun)
            task.is_done = True
            self._pending -= 1
            self._changed.notify_all()
        for other in ready:
            if not self._lanes[other.lane].runs_inline:  # inline tasks are awaited by their pusher
                self._start(other)

    def _raise(self, error: BaseException) -> None:
        if error in self._unraised:
            self._unraised.remove(error)
        detail = (getattr(error, "__notes__", None) or ["in a task"])[0]
        raise EngineError(f"{type(error).__name__}: {error} ({detail})") from error


def _nothing() -> None:
    return None
