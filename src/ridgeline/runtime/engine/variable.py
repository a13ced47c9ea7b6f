"""Variables and tasks: who must wait for whom.

Every variable keeps the queue of the tasks that read or write it, in the order in which they were
pushed. Readers run side by side; a writer waits for all before it; what comes after waits for the
writer. Push order is therefore the serial order that the result equals, and no cycle can arise.

Source: the per-variable queues of MXNet's dependency engine (Chen et al., 2015).
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from ridgeline.timeline import Lane


class Task:
    """One pushed function: its lane, its variables, and whether it is done.

    Attributes:
        name: Span name.
        origin: `file:line` of the push, named in errors.
        error: What it raised, or the error it inherited from a variable; None so far.
        start_ns: `time.perf_counter_ns()` when it was started.
        stop_ns: Likewise when it was done.
    """

    __slots__ = (
        "error", "fn", "is_done", "lane", "name", "origin", "priority", "reads", "sequence",
        "start_ns", "stop_ns", "waits", "writes",
    )  # fmt: skip

    def __init__(
        self,
        fn: Callable[[], Any],
        reads: tuple["Variable", ...],
        writes: tuple["Variable", ...],
        lane: Lane,
        name: str,
        priority: int,
        origin: str,
    ) -> None:
        self.fn = fn
        self.reads = reads
        self.writes = writes
        self.lane = lane
        self.name = name
        self.priority = priority
        self.origin = origin
        self.sequence = 0
        self.waits = 0
        self.error: BaseException | None = None
        self.is_done = False
        self.start_ns = 0
        self.stop_ns = 0

    def __repr__(self) -> str:
        state = "done" if self.is_done else f"waits for {self.waits}" if self.waits else "running"
        return f"Task({self.name} on {self.lane}, {state})"


class Variable:
    """A piece of state that tasks read and write; its `version` counts finished writes.

    `event` is the CUDA event of the last write on a stream lane, if any.
    """

    __slots__ = ("error", "event", "name", "pushed_writes", "queue", "readers", "version", "writer")

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[tuple[Task, bool]] = deque()
        self.readers = 0
        self.writer: Task | None = None
        self.version = 0
        self.pushed_writes = 0
        self.error: BaseException | None = None
        self.event: Any = None

    def __repr__(self) -> str:
        return f"Variable({self.name}, version {self.version}, {len(self.queue)} queued)"

    def append(self, task: Task, *, is_write: bool) -> bool:
        """Queue an access; True when it may begin at once."""
        if is_write:
            self.pushed_writes += 1
        if self.queue or self.writer is not None or (is_write and self.readers):
            self.queue.append((task, is_write))
            return False
        self._enter(task, is_write)
        return True

    def release(self, *, is_write: bool) -> list[Task]:
        """End an access; the tasks whose access begins now."""
        if is_write:
            self.writer = None
            self.version += 1
        else:
            self.readers -= 1
        begun: list[Task] = []
        while self.queue and self.writer is None:
            task, wants_write = self.queue[0]
            if wants_write and self.readers:
                break
            self.queue.popleft()
            self._enter(task, wants_write)
            begun.append(task)
        return begun

    def _enter(self, task: Task, is_write: bool) -> None:
        if is_write:
            self.writer = task
        else:
            self.readers += 1
