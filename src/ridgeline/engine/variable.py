"""Variables: who must wait for whom.

Every variable keeps the queue of the tasks that read or write it, in the order in which they were
pushed. Readers run side by side; a writer waits for all before it; what comes after waits for the
writer. Push order is therefore the serial order that the result equals, and no cycle can arise.

Source: the per-variable queues of MXNet's dependency engine (Chen et al., 2015).
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline.engine.task import EngineTask
from ridgeline.errors import EngineError


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

    def append(self, task: EngineTask, *, is_write: bool) -> bool:
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

    def unfinished_writes(self, last: int) -> list[EngineTask]:
        """The tasks whose writes, up to the version `last`, are still to come."""
        writers = [] if self.writer is None else [self.writer]
        writers.extend(task for task, is_write in self.queue if is_write)
        return writers[: last - self.version]

    def begin(self) -> list[EngineTask]:
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


def check_variables(given: Sequence[Variable], where: str, owner: object) -> None:
    """Raise an EngineError for what is no sequence of variables of this engine."""
    # Classes are compared first, since `isinstance` with an abstract class costs more than the rest.
    if given.__class__ in (tuple, list) or isinstance(given, Sequence):
        for variable in given:
            if variable.__class__ is not Variable:
                break
            if variable.owner is not owner:
                check_owner(variable, where, owner)
        else:
            return
    raise EngineError(
        f"wanted a tuple or list of variables, got {given!r} as reads or writes of {where!r}; make them with "
        "engine.variable() and pass (variable,)"
    )


def check_owner(variable: Variable, where: str, owner: object) -> None:
    """Raise an EngineError for what is no variable of this engine: it does not know another one's tasks."""
    if variable.__class__ is not Variable:
        raise EngineError(
            f"wanted a variable for {where!r}, got {variable!r}; make one with engine.variable()"
        )
    if variable.owner is not owner:
        raise EngineError(
            f"wanted a variable of this engine for {where!r}, got {variable.name!r} of another one; "
            "make it with variable() of the engine that uses it"
        )


def check_alive(variable: Variable, where: str) -> None:
    """Raise an EngineError for a deleted variable."""
    if variable.is_deleted:
        raise EngineError(
            f"wanted a variable in use for {where!r}, got {variable.name!r}, which was deleted; "
            "make a new one with engine.variable()"
        )


def check_all_alive(task: EngineTask) -> None:
    """Raise an EngineError for a task that touches a deleted variable."""
    for variable in task.reads:
        if variable.is_deleted:
            check_alive(variable, task.name)
    for variable in task.writes:
        if variable.is_deleted:
            check_alive(variable, task.name)


def touches_streams(task: EngineTask) -> bool:
    """Some stream may still use the task's variables."""
    for variable in task.reads:
        if variable.writer_event is not None:
            return True
    for variable in task.writes:
        if variable.writer_event is not None:
            return True
        if variable.reader_events:
            return True
    return False


def events_before(task: EngineTask) -> Iterator[Any]:
    """The events that must have come before the task may run on the host."""
    for variable in (*task.reads, *task.writes):
        if variable.writer_event is not None:
            yield variable.writer_event[1]
    for variable in task.writes:
        for event, _ in variable.reader_events.values():
            yield event
