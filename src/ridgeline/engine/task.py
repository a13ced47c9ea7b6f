"""Tasks, the variables that they read and write, and the lanes that they run on.

Every variable keeps the queue of the tasks that read or write it, in the order in which they were
pushed. Readers run side by side; a writer waits for all before it; what comes after waits for the
writer. Push order is therefore the serial order that the result equals, and no cycle can arise.

The four stand together because each is made of the others: a task has variables and a lane, a variable
a queue of tasks, a lane what runs them.

Source: the per-variable queues of MXNet's dependency engine (Chen et al., 2015).
"""

import sys
import threading
from collections import deque
from collections.abc import Callable
from traceback import FrameSummary, StackSummary
from types import CodeType
from typing import Any, Protocol

from ridgeline.timeline import Lane

PushStack = tuple[tuple[CodeType, int], ...]
"""Code and offset of frames, innermost first; lines are looked up when they are wanted."""


class Variable:
    """A piece of state that tasks read and write; its `version` counts finished writes.

    What streams still have to do with it is recorded by events: `writer_event` is (stream key, event,
    sequence) of the last write on a stream lane, `reader_events` maps stream keys to (event,
    sequence) of the reads since. An event has `wait()`, which makes the current stream wait, and
    `synchronize()`, which makes the host wait.

    Attributes:
        name: Serves messages and reports.
        owner: The scheduler's mark: an engine knows its own variables by it.
        version: Writes that are done, failed and skipped ones included.
        error: What poisons it: tasks that touch it are skipped. None if it is sound.
        is_deleted: Nothing may touch it any more.
    """

    __slots__ = (
        "error", "is_deleted", "name", "owner", "pushed_writes", "queue", "reader_events", "readers",
        "version", "waiters", "writer", "writer_event",
    )  # fmt: skip

    def __init__(self, name: str, owner: object = None) -> None:
        self.name = name
        self.owner = owner
        self.queue: deque[tuple[EngineTask, bool]] = deque()
        self.readers = 0
        self.writer: EngineTask | None = None
        self.version = 0
        self.pushed_writes = 0
        self.waiters: list[tuple[int, threading.Lock]] = []
        self.error: BaseException | None = None
        self.is_deleted = False
        self.writer_event: Any = None
        self.reader_events: dict[Any, Any] = {}

    def __repr__(self) -> str:
        state = ", deleted" if self.is_deleted else ", poisoned" if self.error else ""
        return f"Variable({self.name}, version {self.version}, {len(self.queue)} queued{state})"

    def append(self, task: "EngineTask", *, is_write: bool) -> bool:
        """Queue an access; True when it has to wait, False when it may begin at once."""
        if is_write:
            self.pushed_writes += 1
            if self.writer is not None or self.readers or self.queue:
                self.queue.append((task, True))
                return True
            self.writer = task
        else:
            # Behind a waiting writer a reader waits as well: it was pushed later and has to see that write.
            if self.writer is not None or self.queue:
                self.queue.append((task, False))
                return True
            self.readers += 1
        return False

    def release_read(self) -> bool:
        """End a read; True when others may be let in."""
        self.readers -= 1
        return bool(self.queue)

    def release_write(self) -> bool:
        """End the write and wake who waits for it; True when others may be let in."""
        self.writer = None
        self.version += 1
        if self.waiters:
            self.wake()
        return bool(self.queue)

    def wake(self) -> None:
        """Release those that wait for a version that is reached; again after an interrupt, if need be."""
        for target, gate in self.waiters:
            if target <= self.version and gate.locked():
                gate.release()
        # After the gates were opened: an interrupt in between must leave them listed.
        self.waiters = [waiter for waiter in self.waiters if waiter[0] > self.version]

    def unfinished_writes(self, last: int) -> "list[EngineTask]":
        """The tasks whose writes, up to the version `last`, are still to come."""
        writers = [] if self.writer is None else [self.writer]
        writers.extend(task for task, is_write in self.queue if is_write)
        return writers[: last - self.version]

    def begin(self) -> "list[EngineTask]":
        """Let in who is next: one writer, or all readers up to the next writer."""
        begun: list[EngineTask] = []
        queue = self.queue
        while queue and self.writer is None:
            task, wants_write = queue[0]
            if wants_write:
                if self.readers:
                    break
                self.writer = task
            else:
                self.readers += 1
            queue.popleft()
            begun.append(task)
        return begun

    def forget_events(self) -> None:
        """The next user need not wait for any stream."""
        self.writer_event = None
        self.reader_events.clear()


class LaneRunner(Protocol):
    """What the engine needs of a lane.

    A task whose `error` is set when it is started must not run: `finish(task, None)` is all it needs.
    Any other runs by `call`, which notes when it began and who pushes from inside it.
    """

    runs_inline: bool

    def enqueue(self, task: "EngineTask") -> None:
        """A task was pushed; called in push order, under the engine's lock, before it may be ready."""

    def forget(self, task: "EngineTask") -> None:
        """The push of the task did not come about; called under the engine's lock if `keeps_order`."""

    def start(self, task: "EngineTask") -> None:
        """All the task waits for is done: run it and call `finish`.

        After an interrupt it is called again for tasks that no thread has taken (`is_taken`).
        """

    def close(self) -> None:
        """No task will come any more; end the lane's threads."""


class LaneRecord:
    """One lane of one engine.

    Attributes:
        is_inline: Its tasks run in the thread that pushes.
        keeps_order: Its runner has to be notified of every push.
        is_control: It is that of the engine's own tasks, which delete variables and clear errors.
        busy_ns: Time of its tasks so far, summed over its threads.
    """

    __slots__ = (
        "busy_ns",
        "index",
        "is_control",
        "is_inline",
        "keeps_order",
        "kind",
        "name",
        "runner",
    )

    def __init__(
        self, name: str, kind: Lane, index: int, runner: LaneRunner, *, keeps_order: bool
    ) -> None:
        self.name = name
        self.kind: Lane = kind
        self.index = index
        self.runner = runner
        self.is_inline = runner.runs_inline
        self.keeps_order = keeps_order
        self.is_control = False
        self.busy_ns = 0


class EngineTask:
    """One pushed function: its lane, its variables, and whether it is done.

    It remembers the three innermost frames of its push, `depth` frames above the body of the constructor:
    enough to leave a helper or two. Only code and offset are kept, for frames would keep their variables.

    Attributes:
        name: Span name.
        index: Which lane of its kind it ran on: the device, or the thread.
        outer: While its function runs: the task inside whose function that happens, or None.
        error: What it raised, inherited from a variable, or `CancelledError`; None so far.
        is_cancelled: It was cancelled before it began.
        is_done: It ran, was skipped or cancelled, and its variables have been released.
        is_taken: A thread runs it; other threads must leave it alone.
        has_starter: A queue or a thread will take it: after an interrupt it need not be started again.
        start_ns: `time.perf_counter_ns()` when it was started.
        stop_ns: Likewise when it was done.
    """

    __slots__ = (
        "error", "fn", "gate", "has_starter", "index", "is_cancelled", "is_done", "is_taken", "name",
        "num_bytes", "outer", "priority", "reads", "record", "sequence", "stack", "start_ns", "stop_ns",
        "waits", "writes",
    )  # fmt: skip

    def __init__(
        self,
        fn: Callable[[], Any],
        reads: tuple[Variable, ...],
        writes: tuple[Variable, ...],
        record: LaneRecord,
        name: str,
        priority: int,
        num_bytes: int,
        depth: int,
    ) -> None:
        self.fn = fn
        self.reads = reads
        self.writes = writes
        self.record = record
        # Of a lane of threads; the thread that runs it puts its own number here.
        self.index = record.index
        self.name = name
        self.priority = priority
        self.num_bytes = num_bytes
        # Written out: a loop or a function more would cost as much as the rest of this.
        first = sys._getframe(depth)  # noqa: SLF001 - the cheap way to know who pushes
        second = first.f_back
        third = None if second is None else second.f_back
        if second is None:
            self.stack: PushStack = ((first.f_code, first.f_lasti),)
        elif third is None:
            self.stack = ((first.f_code, first.f_lasti), (second.f_code, second.f_lasti))
        else:
            self.stack = (
                (first.f_code, first.f_lasti),
                (second.f_code, second.f_lasti),
                (third.f_code, third.f_lasti),
            )
        self.sequence = 0
        self.waits = 0
        self.gate: threading.Lock | None = None
        self.outer: EngineTask | None = None
        self.error: BaseException | None = None
        self.is_cancelled = False
        self.is_done = False
        self.is_taken = False
        self.has_starter = False
        self.start_ns = 0
        self.stop_ns = 0

    @property
    def lane(self) -> str:
        """As given to the push, such as `loader` or `copy-in:1`."""
        return self.record.name

    @property
    def origin(self) -> str:
        """`file:line` of the push, named in errors."""
        code, offset = self.stack[0]
        return f"{code.co_filename}:{line_of(code, offset)}"

    def push_lines(self) -> str:
        """The stack of the push as Python prints one, innermost frame last."""
        frames = [
            FrameSummary(code.co_filename, line_of(code, offset), code.co_name)
            for code, offset in reversed(self.stack)
        ]
        return "".join(StackSummary.from_list(frames).format()).rstrip()

    def __repr__(self) -> str:
        if self.is_done:
            state = "done"
        elif self.start_ns:
            state = "running"
        else:
            state = f"waits for {self.waits}" if self.waits else "ready"
        return f"EngineTask({self.name} on {self.lane}, {state})"


Finish = Callable[[EngineTask, BaseException | None], Any]
"""`finish(task, error)`: the engine's callback; may be called from any thread, outside locks."""


def line_of(code: CodeType, offset: int) -> int:
    """The source line of an instruction."""
    for start, stop, line in code.co_lines():
        if start <= offset < stop and line is not None:
            return line
    return code.co_firstlineno


class Agenda(deque[EngineTask]):
    """Tasks that a thread will start once it has started the present one.

    It was made while the function of `task` ran, if any; the thread comes back to `outer` afterwards.
    """

    def __init__(
        self, ready: list[EngineTask], task: EngineTask | None, outer: "Agenda | None"
    ) -> None:
        super().__init__(ready)
        self.task = task
        self.outer = outer


class Here(threading.local):
    """What the present thread is doing for engines: the task whose function runs, the innermost agenda."""

    task: EngineTask | None = None
    agenda: Agenda | None = None


here = Here()


def closed_gate() -> threading.Lock:
    """A lock that is held: acquiring it sleeps until another thread releases it."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def open_gates(gates: list[threading.Lock]) -> None:
    """Wake those who sleep at these gates, which are forgotten; again after an interrupt, if need be."""
    for gate in gates:
        # It may be open already, where an interrupt came in between and this runs again.
        if gate.locked():
            gate.release()
    gates.clear()


def nothing() -> None:
    """What is left of a function that ran."""
