"""What stands behind an engine: tasks wait for their variables, start on their lanes, and end.

One lock guards variables, counts and gates; it is held for a few microseconds per task, and neither
tasks nor lanes run under it. Whoever ends the last thing that a task waits for starts it.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter_ns

from ridgeline.errors import EngineError
from ridgeline.runtime.engine import failures
from ridgeline.runtime.engine.failures import Failures
from ridgeline.runtime.engine.lane_table import LaneRecord, LaneTable
from ridgeline.runtime.engine.lanes import Finish, LaneRunner
from ridgeline.runtime.engine.pacing import Pacing
from ridgeline.runtime.engine.process import Process
from ridgeline.runtime.engine.task import Task, here
from ridgeline.runtime.engine.threads import ThreadLane
from ridgeline.runtime.engine.variable import Variable

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
        self.lock = threading.Lock()
        self.pacing = Pacing(
            self.lock, max_pending=max_pending, max_bytes=max_bytes, max_batches=max_batches
        )
        self.failures = Failures()
        self.num_pushed = 0
        self.num_failed = 0
        self.num_skipped = 0
        self.num_cancelled = 0
        self.begin_ns = perf_counter_ns()
        self.spans: deque[tuple[str, LaneRecord, int, int, int]] = deque(maxlen=SPANS_KEPT)
        self._is_serial = serial
        self._idle_gates: list[threading.Lock] = []
        self._is_closed = False
        self.process = Process()
        self.lanes = LaneTable(
            lanes,
            finish=self.finish,
            finish_and_next=self.finish_and_next,
            threads=threads,
            serial=serial,
        )

    def push(self, task: Task) -> None:
        """Register a task and start it if it may start; see `Engine.push`."""
        if self.process.is_forked:
            self.process.check("push")
        record = task.record
        runner = record.runner
        reads, writes, pacing = task.reads, task.writes, self.pacing
        with self.lock:
            if pacing.pending >= pacing.max_pending or task.num_bytes or self._is_closed:
                self._await_admission(task)
            for variable in reads:
                if variable.is_deleted:
                    check_alive(variable, task.name)
            for variable in writes:
                if variable.is_deleted:
                    check_alive(variable, task.name)
            task.sequence = self.num_pushed + 1
            if record.keeps_order:
                runner.enqueue(task)
            self.num_pushed += 1
            pacing.pending = pending = pacing.pending + 1
            if pending > pacing.most_pending:
                pacing.most_pending = pending
            if task.num_bytes:
                pacing.enter_bytes(task.num_bytes)
            waits = 0
            for variable in reads:
                waits += variable.append(task, is_write=False)
            for variable in writes:
                waits += variable.append(task, is_write=True)
            task.waits = waits
            if waits:
                if runner.runs_inline and not record.is_control and not self.is_inside():
                    task.gate = closed_gate()
            elif writes or reads:
                _inherit_error(task)
        if task.gate is not None:
            self._pass_gate(task, task.gate)
        elif not waits:
            if record.is_control:
                self.finish(task, None)
            else:
                runner.start(task)
        if self._is_serial and not runner.runs_inline and not self.is_inside():
            self.drain()

    def finish(self, task: Task, error: BaseException | None) -> None:
        """A task is over: release what it held and start what waited for it."""
        following = self.finish_and_next(task, error)
        if following is not None:
            self._start_all([following])

    def finish_and_next(self, task: Task, error: BaseException | None) -> Task | None:
        """Likewise; a task of the same lane that became ready is left to the caller."""
        record, pacing = task.record, self.pacing
        stop_ns = perf_counter_ns()
        start_ns = task.start_ns
        task.stop_ns = stop_ns
        if start_ns:
            self.spans.append((task.name, record, task.index, start_ns, stop_ns))
        else:  # it was skipped
            task.start_ns = start_ns = stop_ns
        ready: list[Task] | None = None
        with self.lock:
            record.busy_ns += stop_ns - start_ns
            if error is not None or task.error is not None:
                self._fail(task, error)
            elif record.is_control:
                task.fn()
            for variable in task.reads:
                if variable.release_read():
                    ready = self._begin(variable, ready)
            for variable in task.writes:
                if task.error is not None:
                    variable.error = task.error
                if variable.release_write():
                    ready = self._begin(variable, ready)
            task.is_done = True
            task.fn = _nothing  # a caller who keeps the task does not keep what its function holds
            pacing.pending -= 1
            if pacing.is_watched or task.num_bytes:
                pacing.leave(task)
            if self._idle_gates and not pacing.pending:
                for gate in self._idle_gates:
                    gate.release()
                self._idle_gates.clear()
        return self._hand_over(record, ready) if ready else None

    def drain(self) -> None:
        """Block until nothing is pending."""
        with self.lock:
            if not self.pacing.pending:
                return
            gate = closed_gate()
            self._idle_gates.append(gate)
        gate.acquire()

    def shut(self) -> None:
        """Refuse pushes from outside, finish what is pending, end the threads; safe to call twice."""
        if self.process.is_forked:
            self._is_closed = True
            return
        self.check_outside("close")
        with self.lock:
            self._is_closed = True
        self.drain()
        for record in list(self.lanes.records.values()):
            record.runner.close()

    @property
    def has_threads(self) -> bool:
        """Whether this process has threads of its lanes, which somebody has to end."""
        return not self.process.is_forked and any(
            isinstance(record.runner, ThreadLane) for record in list(self.lanes.records.values())
        )

    def is_inside(self) -> bool:
        """The caller is a task of this engine."""
        task = here.task
        return task is not None and self.lanes.owns(task.record)

    def check_outside(self, what: str) -> None:
        """Refuse what a task could wait for only forever.

        Raises:
            EngineError: a task of this engine calls.
        """
        if self.is_inside():
            task = here.task
            raise EngineError(
                f"wanted {what}() outside of the engine's tasks, got it in {task and task.name!r}, which "
                "it would wait for; wait for single variables there"
            )

    def _await_admission(self, task: Task) -> None:
        """Wait for room, or refuse the task; called under the lock, which is free meanwhile.

        Raises:
            EngineError: the engine is closed.
        """
        if self.is_inside():  # it would wait for its own end
            return
        if not self.pacing.has_room(task.num_bytes):
            self.pacing.await_room(task.num_bytes)
        if self._is_closed:
            raise EngineError(
                f"wanted an open engine for task {task.name!r} ({task.origin}), got a closed one; "
                "push before close() or make a new Engine"
            )

    def _pass_gate(self, task: Task, gate: threading.Lock) -> None:
        """Run a task in this thread as soon as it may run."""
        try:
            gate.acquire()
        except BaseException:  # an interrupt: the task is registered, so it has to come to its end
            with self.lock:
                task.gate = None
                task.error = task.error or failures.cancellation(task)
                task.is_cancelled = True
                is_ready = not task.waits
            if is_ready:
                self._start(task)
            raise
        self._start(task)

    def _start(self, task: Task) -> None:
        """Hand a task that nothing holds back to its lane."""
        if task.record.is_control:
            self.finish(task, None)
        else:
            task.record.runner.start(task)

    def _start_all(self, ready: list[Task]) -> None:
        """Start tasks that became ready, one after the other.

        A lane may end a task while it starts it, which makes others ready: they join the agenda of the
        thread, for a chain of such tasks would otherwise use up the stack.
        """
        if here.agenda is not None:
            here.agenda.extend(ready)
            return
        here.agenda = agenda = deque(ready)
        interrupt: BaseException | None = None
        try:
            while agenda:
                try:
                    self._start(agenda.popleft())
                except BaseException as error:  # noqa: BLE001 - the others start before it goes on
                    interrupt = error
        finally:
            here.agenda = None
        if interrupt is not None:
            raise interrupt

    def _hand_over(self, record: LaneRecord, ready: list[Task]) -> Task | None:
        """Start what is ready, but for the first task of this lane, which is returned."""
        following = None
        for position, other in enumerate(ready):
            if other.record is record:
                following = ready.pop(position)
                break
        if ready:
            self._start_all(ready)
        return following

    def _fail(self, task: Task, error: BaseException | None) -> None:
        """Count what did not end well."""
        if error is not None:
            task.error = error
            self.failures.add(task, error)
            self.num_failed += 1
        elif task.is_cancelled:
            self.num_cancelled += 1
        else:
            self.num_skipped += 1

    def _begin(self, variable: Variable, ready: list[Task] | None) -> list[Task]:
        """Let in whoever is next in a variable's queue; `ready` with those that wait for nothing more."""
        ready = [] if ready is None else ready
        for task in variable.begin():
            task.waits -= 1
            if not task.waits:
                _inherit_error(task)
                if task.gate is None:
                    ready.append(task)
                else:
                    task.gate.release()
        return ready


def closed_gate() -> threading.Lock:
    """A lock that is held: who acquires it sleeps until somebody else releases it."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def check_alive(variable: Variable, where: str) -> None:
    """Refuse a deleted variable.

    Raises:
        EngineError: it was deleted.
    """
    if variable.is_deleted:
        raise EngineError(
            f"wanted a variable in use for {where!r}, got {variable.name!r}, which was deleted; "
            "make a new one with engine.variable()"
        )


def _inherit_error(task: Task) -> None:
    """A task that touches a poisoned variable will not run; called when all before it is done."""
    if task.error is not None or task.record.is_control:
        return
    for variable in task.reads:
        if variable.error is not None:
            task.error = variable.error
            return
    for variable in task.writes:
        if variable.error is not None:
            task.error = variable.error
            return


def _nothing() -> None:
    return None
