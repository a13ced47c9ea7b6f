"""Lanes: where tasks run. Each kind turns a ready task into work and reports when it is done.

`InlineLane` runs in the thread that pushes (compute, host). `ThreadLane`, in threads.py, has workers
of its own (loader, disk). `WorkLane` starts asynchronous collectives and is notified of their end (gloo).
`StreamLane`, in streams.py, enqueues on a CUDA stream; its tasks are over, for the host, once enqueued.
Collectives must start in the same order on every worker, so the last two keep push order.
"""

import abc
import threading
from _thread import start_new_thread
from collections import deque
from functools import partial
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable

from ridgeline.engine.arguments import UNBEGUN, check_ran
from ridgeline.engine.lanes.returning import Returning
from ridgeline.engine.middle import runs_tasks
from ridgeline.engine.task import EngineTask, Finish, here
from ridgeline.engine.variable import events_before, touches_streams
from ridgeline.errors import EngineError


@runtime_checkable
class JoinableLane(Protocol):
    """A lane whose tasks may still run on a device when the engine holds them for done."""

    def join(self) -> None:
        """Make the caller's current stream wait for everything that was enqueued so far."""


class InlineLane:
    """Runs tasks in the pushing thread; a push returns when the task is done.

    Attributes:
        cut_short: Tasks whose end an interrupt kept from the engine, with what they failed by.
    """

    runs_inline = True

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self.cut_short: deque[tuple[EngineTask, BaseException | None]] = deque()

    def enqueue(self, task: EngineTask) -> None:
        """Nothing to prepare."""

    def forget(self, task: EngineTask) -> None:
        """Nothing to undo."""

    def start(self, task: EngineTask) -> None:
        """Run it here and now. An interrupt or exit continues to the caller."""
        if task.is_taken:
            return
        try:
            task.is_taken = True
            # Without variables there is nothing that a stream could still be using.
            error = (call_on_host if task.writes or task.reads else call)(task)
            self._finish(task, error)
        except BaseException as raised:
            self.cut_short += ((task, raised),)  # no call, which could be interrupted
            raise
        if error is not None and not isinstance(error, Exception):
            raise error

    def close(self) -> None:
        """Nothing to end."""


class ControlLane(InlineLane):
    """For the engine's own tasks, which `finish` runs under the engine's lock."""

    def start(self, task: EngineTask) -> None:
        """It has come to its end."""
        try:
            task.is_taken = True
            self._finish(task, None)
        except BaseException:
            self.cut_short += ((task, None),)
            raise


class InOrderLane(abc.ABC):
    """Starts tasks in push order, however they become ready, one at a time, outside its lock.

    Whichever thread finds the next task ready launches it; a thread that comes while another launches
    leaves its task to that one. So no lane waits for another lane's lock.
    """

    runs_inline = False

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        self._order: deque[EngineTask] = deque()
        self._ready: set[int] = set()
        self._lock = threading.RLock()  # see `Scheduler.lock`
        self._launcher: object = None  # the thread that launches at present

    def enqueue(self, task: EngineTask) -> None:
        """Note its place."""
        with self._lock:
            self._order.append(task)

    def forget(self, task: EngineTask) -> None:
        """Take it out of the order; it never becomes ready."""
        with self._lock:
            if task in self._order:
                self._order.remove(task)

    def start(self, task: EngineTask) -> None:
        """Launch it and what waited behind it, unless something before it is not ready."""
        # A mark of this call: the same thread may come here again through a task that it launches.
        me = object()
        try:
            with self._lock:
                self._ready.add(task.sequence)
                if self._launcher is None:
                    self._launcher = me
            if self._launcher is me:
                self._launch_ready(me)
        except BaseException as raised:
            start_new_thread(self._go_on, (me, raised))
            raise

    @abc.abstractmethod
    def launch(self, task: EngineTask) -> None:
        """Start the task's work; must see to it that `finish` is called, and must not raise."""

    def close(self) -> None:  # noqa: B027 - most lanes own nothing that ends
        """Nothing to end."""

    def _launch_ready(self, me: object) -> None:
        while (head := self._take(me)) is not None:
            head.is_taken = True
            if head.error is None:
                self.launch(head)
                head.has_starter = True
            else:  # a task it depends on failed: there is no work to wait for
                self._finish(head, None)

    def _take(self, me: object) -> EngineTask | None:
        """The next task to launch; it stays the first until it is launched, or else it could be lost."""
        with self._lock:
            # Removed only now: a launch that an interrupt cut short must find its task still first.
            if self._order and self._order[0].is_taken:
                self._ready.discard(self._order.popleft().sequence)
            if self._order and self._order[0].sequence in self._ready:
                return self._order[0]
            self._launcher = None
            # One that a signal handler or finalizer made ready right before that was left to this call.
            if self._order and self._order[0].sequence in self._ready:
                self._launcher = me
                return self._order[0]
            return None

    def _go_on(self, launcher: object, error: BaseException) -> None:
        """Launch on where an interrupt ended that; what is half launched has failed."""
        if self._launcher is launcher:
            head = self._order[0] if self._order else None
            if head is not None and head.is_taken and not head.has_starter:
                self._finish(head, error)
            self._launch_ready(launcher)


class WorkLane(InOrderLane):
    """Tasks start something asynchronous and return its `torch.futures.Future`."""

    def launch(self, task: EngineTask) -> None:
        """Start the work; its future reports the end."""
        returned: list[Any] = []
        error = call_on_host(task, returned)
        if error is not None:
            self._finish(task, error)
            return
        future = returned[0]
        if not all(hasattr(future, name) for name in ("add_done_callback", "done", "value")):
            wrong = (
                f"wanted a torch Future from task {task.name!r} on lane {task.lane}, got {future!r}"
            )
            self._finish(task, EngineError(f"{wrong}; return work.get_future()"))
            return
        if not future.done():
            future.add_done_callback(Returning(partial(self._done, task)))
        # One that is done by now may call back here and now, where torch would drop an interrupt.
        if future.done():
            self._done(task, future)

    def _done(self, task: EngineTask, future: Any) -> None:
        error: BaseException | None = None
        try:
            future.value()
        except Exception as raised:  # noqa: BLE001 - a lost peer surfaces here as RuntimeError
            error = raised
        self._finish(task, error)


@runs_tasks
def call(task: EngineTask, returned: list[Any] | None = None) -> BaseException | None:
    """Run the task's function; what it raised, or None.

    `returned` gets what the function returned; what is pushed from inside it is known as nested.
    """
    if task.error is not None:
        return None
    thread = here.__dict__  # of this thread: three accesses through `here` cost a tenth of a task
    outer = thread.get("task")
    try:
        task.outer = outer
        thread["task"] = task
        task.start_ns = perf_counter_ns()
        value = task.fn()
        if returned is not None:
            returned.append(value)
        elif value is not None and type(value) in UNBEGUN:
            check_ran(value, task.name)
    except BaseException as error:  # noqa: BLE001 - whatever a task raises travels to its waiters
        return error
    finally:
        thread["task"] = outer
        task.outer = None
    return None


def call_on_host(task: EngineTask, returned: list[Any] | None = None) -> BaseException | None:
    """Run the task's function once the streams are through with its variables.

    Cost: Blocks the calling thread while a stream still uses them.
    """
    if task.error is None and touches_streams(task):
        try:
            # The host reads or writes memory here, which ordering streams does not protect.
            for event in events_before(task):
                event.synchronize()
        except Exception as error:  # noqa: BLE001 - a device's failure surfaces here, as the task's own
            return error
        for variable in task.writes:
            variable.forget_events()
    return call(task, returned)
