"""What stands behind an engine: tasks wait for their variables, start on their lanes, and end.

One lock guards variables, counts and gates; it is held for a few microseconds per task, and neither
tasks nor lanes run under it. The thread that ends the last thing that a task waits for starts it.

An interrupt may come anywhere. One that comes while the state changes leaves a note of what is half done; the
next change has that repaired first; `settle` then starts what no other thread will start. Both happen apart.
"""

import threading
from _thread import get_ident, start_new_thread
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

from ridgeline.engine.apart import apart
from ridgeline.engine.failures import Failures
from ridgeline.engine.lanes.lane_table import LaneTable
from ridgeline.engine.middle import check_outside, is_pushed_in_the_middle, own
from ridgeline.engine.pacing import RECHECK_S, Pacing
from ridgeline.engine.process import Process
from ridgeline.engine.safety.late import LATE, LatePushes
from ridgeline.engine.safety.mending import complete, inherit_error, mend, settle, undo_push
from ridgeline.engine.safety.waiting import blocked_by, has_no_end, pushed
from ridgeline.engine.task import (
    Agenda,
    EngineTask,
    Finish,
    LaneRecord,
    LaneRunner,
    Variable,
    closed_gate,
    here,
    nothing,
    open_gates,
)
from ridgeline.engine.variable import check_all_alive
from ridgeline.errors import EngineError

SPANS_KEPT = 100_000
"""Spans an engine remembers; older ones are dropped, so that a long run stays bounded in memory."""


class Scheduler:
    """The state of one engine; arguments as for `Engine`."""

    def __init__(
        self,
        *,
        max_pending: int,
        max_bytes: int | None,
        max_batches: int,
        threads: Mapping[str, int],
        lanes: Mapping[str, Callable[[Finish], LaneRunner]],
        serial: bool,
    ) -> None:
        # Of a kind that its own thread may take again: a signal handler or finalizer would wait for itself.
        make_lock: Any = threading.RLock
        self.lock = make_lock()
        self.owns_lock: Callable[[], bool] = self.lock._is_owned  # noqa: SLF001 - by the present thread
        self.pacing = Pacing(max_pending=max_pending, max_bytes=max_bytes, max_batches=max_batches)
        self.unfinished = self.pacing.unfinished
        # Variables refer to this instead of the scheduler: they must not keep an engine alive.
        self.owner = object()
        self.half_done: tuple[Any, ...] | None = None  # what repairs it, and its arguments
        self._last_lost = 0  # number of a task
        self.failures = Failures()
        self.num_pushed = 0
        self.num_failed = 0
        self.num_skipped = 0
        self.num_cancelled = 0
        self.begin_ns = perf_counter_ns()
        self.spans: deque[tuple[str, LaneRecord, int, int, int]] = deque(maxlen=SPANS_KEPT)
        self._is_serial = serial
        self.drops_at_exit = False
        self.idle_gates: list[threading.Lock] = []
        self._limit = max_pending  # 0 once it is closed
        self.process = Process()
        self.late = LatePushes(self)
        self.lanes = LaneTable(
            lanes,
            finish=self.finish,
            finish_and_next=self.finish_and_next,
            recover=self.recover,
            process=self.process,
            threads=threads,
            serial=serial,
        )

    @own
    def push(self, task: EngineTask) -> None:
        """Register a task and start it if it may start; see `Engine.push`."""
        if self.process.is_forked:
            self.process.check("push")
        if self.owns_lock():  # of a signal handler or finalizer
            if not self.is_inside():
                self._check_open(task)
            check_all_alive(task)
            self.late.add(task)
            return
        if self.late.tasks:
            self.late.register()
        self.start(task, self.register(task))

    def register(self, task: EngineTask) -> int:
        """Queue a task once there is room; how many of its variables it waits for."""
        record, has_variables = task.record, task.writes or task.reads
        waits = 0
        room: threading.Lock | None = None
        while True:
            with self.lock:
                if self.half_done is None:
                    pending = len(self.unfinished)
                    if (pending < self._limit and not task.num_bytes) or self._admits(task):
                        if has_variables and not task.sequence:
                            check_all_alive(task)
                        task.sequence = sequence = self.num_pushed + 1
                        try:
                            if record.keeps_order:
                                record.runner.enqueue(task)
                            if task.num_bytes:
                                self.pacing.enter_bytes(task.num_bytes)
                            if has_variables:
                                waits = self._queue(task)
                        except BaseException:
                            self.half_done = undo_push, task
                            raise
                        if record.is_inline and not waits:
                            task.has_starter = True  # this thread
                        self.num_pushed = sequence
                        self.unfinished[sequence] = task
                        if pending >= self.pacing.most_pending:
                            self.pacing.most_pending = pending + 1
                        break
                    # Still under the lock: a task that ended in between would find no gate to open.
                    room = self.pacing.room_gate(room)
            if self.half_done is not None:
                apart(mend, self)
            elif room is not None:
                if here.task is not None and has_no_end(self):
                    task.sequence = LATE  # for room it would wait for itself
                else:
                    self.pacing.wait_at(room, RECHECK_S)
        if room is not None:
            pushed()
        return waits

    def start(self, task: EngineTask, waits: int) -> None:
        """Start a task that was registered, if that is its pusher's."""
        record = task.record
        if not waits:
            record.runner.start(task)
        elif task.gate is not None:
            self._pass_gate(task, task.gate)
        if self._is_serial and not record.is_inline and not self.is_inside():
            self.drain()

    def _queue(self, task: EngineTask) -> int:
        """Queue a task at its variables, under the lock; how many of them it waits for."""
        waits = 0
        for variable in task.reads:
            waits += variable.append(task, is_write=False)
        for variable in task.writes:
            waits += variable.append(task, is_write=True)
        if not waits:
            inherit_error(task)
            return 0
        task.waits = waits
        is_waited_for = task.record.is_inline and not task.record.is_control
        if is_waited_for and not (self.is_inside() or is_pushed_in_the_middle(self, _PUSH)):
            task.gate = closed_gate()
        return waits

    @own
    def finish(self, task: EngineTask, error: BaseException | None) -> None:
        """A task is over: release what it held and start what waited for it."""
        if self.owns_lock():  # told by a signal handler or finalizer, as of a future
            start_new_thread(self.finish, (task, error))
            return
        try:
            following = self.finish_and_next(task, error)
            if following is not None:
                self.start_all([following])
        except BaseException:
            start_new_thread(settle, (self, None))
            raise

    @own
    def finish_and_next(self, task: EngineTask, error: BaseException | None) -> EngineTask | None:
        """Likewise; a task of the same lane that became ready is left to the caller."""
        if (
            self.process.is_forked
        ):  # by the task; who else was in the engine is not here to leave it
            return None
        record, pacing = task.record, self.pacing
        # Dropped without the lock: what a user's function or error holds may push when it goes.
        dropped: list[object] = [task.fn]
        stop_ns = perf_counter_ns()
        ready: list[EngineTask] | None = None
        while True:
            with self.lock:
                if task.is_done:  # ended already, by who repaired an interrupt
                    return None
                if self.half_done is None:
                    try:
                        task.stop_ns = stop_ns
                        if task.start_ns:
                            self.spans.append(
                                (task.name, record, task.index, task.start_ns, stop_ns)
                            )
                            record.busy_ns += stop_ns - task.start_ns
                        else:  # it was skipped
                            task.start_ns = stop_ns
                        if error is not None or task.error is not None:
                            self.fail(task, error)
                        # Before the release: it wakes threads that read this without the lock.
                        task.is_done = True
                        if task.writes or task.reads:
                            ready = self._release(task, dropped)
                        # A caller who keeps the task does not keep what its function holds.
                        task.fn = nothing
                        del self.unfinished[task.sequence]
                        if pacing.is_watched or task.num_bytes:
                            pacing.leave(task)
                        if self.idle_gates and not self.unfinished:
                            open_gates(self.idle_gates)
                    except BaseException:
                        self.half_done = complete, task, error
                        raise
                    break
            apart(mend, self)
        dropped.clear()
        return self._hand_over(record, ready) if ready else None

    def _release(self, task: EngineTask, dropped: list[object]) -> list[EngineTask] | None:
        """Give back a task's variables, under the lock; what became ready by it."""
        ready: list[EngineTask] | None = None
        error = task.error
        if task.record.is_control and error is None:
            dropped.append(task.fn())
        for variable in task.reads:
            if variable.release_read():
                ready = self._begin(variable, ready)
        for variable in task.writes:
            if error is not None:
                variable.error = error
            if variable.release_write():
                ready = self._begin(variable, ready)
        return ready

    def recover(self, task: EngineTask | None, error: BaseException) -> None:
        """An exception reached a lane's thread in the engine's own code: end its task, then go on."""
        if task is not None and not task.is_done:
            self.finish(task, error)
        settle(self, None)

    def make_lane(self, name: str, where: str) -> LaneRecord:
        """A lane on its first use; a forked child's copy of the table may be locked for good."""
        self.process.check("push")
        return self.lanes.make(name, where)

    def drain(self) -> None:
        """Block until nothing is pending."""
        if self.late.tasks:
            self.late.register()
        if self.half_done is not None:  # the stack was too full even to begin with that
            apart(settle, self, None)
        with self.lock:
            if not self.unfinished:
                return
            gate = closed_gate()
            self.idle_gates.append(gate)
        with blocked_by(self, "wait_all or close"):
            gate.acquire()

    def shut(self, *, waits: bool = True) -> None:
        """Refuse pushes from outside, finish what is pending, end the threads; safe to call twice."""
        if self.process.is_forked:
            self._limit = 0
            return
        check_outside(self, "close")
        self._limit = 0
        self.drain()
        self.lanes.close(waits=waits)

    def is_inside(self) -> bool:
        """The caller is a task of this engine, if only through tasks of others that it runs."""
        task = here.task
        while task is not None:
            if self.lanes.owns(task.record):
                return True
            task = task.outer
        return False

    def _admits(self, task: EngineTask) -> bool:
        """Whether there is room for the task, under the lock; an EngineError where the engine is closed."""
        if task.sequence or self.is_inside():  # it would wait for its own end
            return True
        self._check_open(task)
        return self.pacing.has_room(task.num_bytes) or is_pushed_in_the_middle(self, _PUSH)

    def _check_open(self, task: EngineTask) -> None:
        if not self._limit:
            raise EngineError(
                f"wanted an open engine for task {task.name!r} ({task.origin}), got a closed one; "
                "push before close() or make a new Engine"
            )

    def _pass_gate(self, task: EngineTask, gate: threading.Lock) -> None:
        """Run a task in this thread as soon as it may run."""
        gate.acquire()
        task.record.runner.start(task)

    @own
    def start_all(self, ready: list[EngineTask]) -> None:
        """Start tasks that became ready, one after the other.

        A lane may end a task while it starts it, which makes others ready: they join the agenda of the
        thread, for a chain of such tasks would otherwise use up the stack. A function that runs meanwhile
        has agendas of its own: what it pushes and waits for must not be left until it is over.
        """
        outer = here.agenda
        if outer is not None and outer.task is here.task:
            outer.extend(ready)
            return
        agenda = Agenda(ready, here.task, outer)
        interrupt: BaseException | None = None
        try:
            here.agenda = agenda
            while agenda:
                task = agenda.popleft()
                try:
                    task.record.runner.start(task)
                except BaseException as error:  # noqa: BLE001 - the others start before it continues
                    interrupt = error
        finally:
            here.agenda = outer
        # What a task raised is reported by its variables. Ctrl-C is for the main thread; a lane's thread must
        # not end.
        if isinstance(interrupt, Exception) or (
            interrupt is not None and get_ident() == threading.main_thread().ident
        ):
            raise interrupt

    def _hand_over(self, record: LaneRecord, ready: list[EngineTask]) -> EngineTask | None:
        """Start what is ready, but for the first task of this lane, which is returned."""
        following = None
        for position, other in enumerate(ready):
            if other.record is record:
                following = ready.pop(position)
                break
        if ready:
            self.start_all(ready)
        return following

    def fail(self, task: EngineTask, error: BaseException | None) -> None:
        """Count what did not end well."""
        if error is not None:
            task.error = error
        if self._last_lost == task.sequence:  # counted before an interrupt
            return
        if error is not None:
            self.failures.add(task, error)
            self.num_failed += 1
        elif task.is_cancelled:
            self.num_cancelled += 1
        else:
            self.num_skipped += 1
        self._last_lost = task.sequence

    def _begin(self, variable: Variable, ready: list[EngineTask] | None) -> list[EngineTask]:
        """Let in what is next in a variable's queue; `ready` with those that wait for nothing more."""
        ready = [] if ready is None else ready
        for task in variable.begin():
            task.waits -= 1
            if not task.waits:
                inherit_error(task)
                if task.gate is None:
                    ready.append(task)
                else:
                    task.gate.release()
        return ready


_PUSH = Scheduler.push.__code__
