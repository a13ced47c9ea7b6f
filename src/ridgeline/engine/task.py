"""Tasks: one pushed function each, with what became of it and where it came from."""

import sys
import threading
from collections import deque
from collections.abc import Callable
from traceback import FrameSummary, StackSummary
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.engine.lanes.lane_table import LaneRecord
    from ridgeline.engine.variable import Variable

PushStack = tuple[tuple[CodeType, int], ...]
"""Code and offset of frames, innermost first; lines are looked up when they are wanted."""


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
        reads: tuple["Variable", ...],
        writes: tuple["Variable", ...],
        record: "LaneRecord",
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


def line_of(code: CodeType, offset: int) -> int:
    """The source line of an instruction."""
    for start, stop, line in code.co_lines():
        if start <= offset < stop and line is not None:
            return line
    return code.co_firstlineno


def nothing() -> None:
    """What is left of a function that ran."""
