"""Lanes: where tasks run. Each kind turns a ready task into work and reports when it is done.

`InlineLane` runs in the thread that pushes (compute, host). `ThreadLane` has a thread of its own
(loader, disk). `WorkLane` starts asynchronous collectives and is told of their end (gloo).
`StreamLane` enqueues on a CUDA stream; its tasks are over, for the host, once enqueued.
Collectives must start in the same order on every worker, so the last two keep push order.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from ridgeline.runtime.engine.variable import Task

Finish = Callable[[Task, BaseException | None], None]
"""`finish(task, error)`: the engine's callback; may be called from any thread, outside locks."""


class LaneRunner(Protocol):
    """What the engine needs of a lane."""

    runs_inline: bool

    def enqueue(self, task: Task) -> None:
        """A task was pushed; called in push order, before it may be ready."""

    def start(self, task: Task) -> None:
        """All the task waits for is done: run it and call `finish` once."""

    def close(self) -> None:
        """No task will come any more; end the lane's threads."""


class InlineLane:
    """Runs tasks in the pushing thread; a push returns when the task is done."""

    runs_inline = True

    def __init__(self, finish: Finish) -> None:
        self._finish = finish

    def enqueue(self, task: Task) -> None:
        """Nothing to prepare."""

    def start(self, task: Task) -> None:
        """Run it here and now."""
        self._finish(task, call(task))

    def close(self) -> None:
        """Nothing to end."""


class ThreadLane:
    """One worker thread; ready tasks run by priority (higher first), then in push order."""

    runs_inline = False

    def __init__(self, finish: Finish, name: str) -> None:
        self._finish = finish
        self._name = name
        self._ready: list[tuple[int, int, Task]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def enqueue(self, task: Task) -> None:
        """Start the thread with the first task."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"ridgeline-{self._name}", daemon=True
            )
            self._thread.start()

    def start(self, task: Task) -> None:
        """Hand the task to the thread."""
        with self._changed:
            heapq.heappush(self._ready, (-task.priority, task.sequence, task))
            self._changed.notify()

    def close(self) -> None:
        """Let the thread finish what is ready, then end it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._is_closed)
                if not self._ready:
                    return
                _, _, task = heapq.heappop(self._ready)
            self._finish(task, call(task))


class _InOrder:
    """Starts tasks in push order, however they become ready."""

    def __init__(self) -> None:
        self._order: deque[Task] = deque()
        self._ready: set[int] = set()
        self._lock = threading.RLock()

    def enqueue(self, task: Task) -> None:
        with self._lock:
            self._order.append(task)

    def start(self, task: Task) -> None:
        with self._lock:
            self._ready.add(task.sequence)
            while self._order and self._order[0].sequence in self._ready:
                head = self._order.popleft()
                self._ready.discard(head.sequence)
                self._launch(head)

    def _launch(self, task: Task) -> None:
        raise AssertionError("a lane defines how it launches")


class WorkLane(_InOrder):
    """Tasks start something asynchronous and return its `torch.futures.Future`."""

    runs_inline = False

    def __init__(self, finish: Finish) -> None:
        super().__init__()
        self._finish = finish

    def _launch(self, task: Task) -> None:
        if task.error is not None:  # a task it depends on failed: there is no work to wait for
            self._finish(task, None)
            return
        try:
            future = task.fn()
        except Exception as error:  # noqa: BLE001 - whatever a task raises travels to its waiters
            self._finish(task, error)
            return
        future.add_done_callback(partial(self._done, task))

    def _done(self, task: Task, future: Any) -> None:
        error: BaseException | None = None
        try:
            future.value()
        except Exception as raised:  # noqa: BLE001 - a lost peer surfaces here as RuntimeError
            error = raised
        self._finish(task, error)

    def close(self) -> None:
        """Nothing to end: the process group owns the threads."""


class StreamLane(_InOrder):
    """Tasks enqueue on one CUDA stream; each leaves an event in the variables it writes."""

    runs_inline = False

    def __init__(self, finish: Finish, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._finish = finish
        self.stream = stream

    def _launch(self, task: Task) -> None:
        error: BaseException | None = None
        ready = torch.cuda.current_stream().record_event()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            for variable in (*task.reads, *task.writes):
                if variable.event is not None:
                    self.stream.wait_event(variable.event)
            try:
                task.fn()
            except Exception as raised:  # noqa: BLE001 - travels to the task's waiters
                error = raised
            done = self.stream.record_event()
        for variable in task.writes:
            variable.event = done
        self._finish(task, error)

    def close(self) -> None:
        """Nothing to end: work already enqueued runs on."""


def call(task: Task) -> BaseException | None:
    """Run the task's function; what it raised, or None."""
    try:
        task.fn()
    except Exception as error:  # noqa: BLE001 - whatever a task raises travels to its waiters
        return error
    return None
