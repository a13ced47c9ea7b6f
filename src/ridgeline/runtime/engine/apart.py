"""What has to come to its end is done apart: in a thread that no signal and no used-up stack reaches.

Python raises KeyboardInterrupt in the main thread between any two of its instructions, and RecursionError
where the stack ends. Code that mends what such an exception left half done would meet the next one. The
handlers call `start_new_thread` and `get` themselves: both are C, and take no frame of a stack that is full.
"""

from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ridgeline.runtime.engine import failures
from ridgeline.runtime.engine.task import Task, nothing, open_gates

if TYPE_CHECKING:
    from ridgeline.runtime.engine.pacing import Pacing
    from ridgeline.runtime.engine.scheduler import Scheduler
    from ridgeline.runtime.engine.variable import Variable


class Over(SimpleQueue[None]):
    """Gets an item when something done apart is over.

    Attributes:
        is_over: Set before, for an interrupt may come when the item has just been taken.
    """

    is_over = False


def run_apart(over: Over, action: Callable[..., Any], *arguments: Any) -> None:
    """The body of such a thread; what `action` raises is reported by `sys.unraisablehook`."""
    try:
        action(*arguments)
    finally:
        over.is_over = True
        over.put(None)


def undo_push(scheduler: "Scheduler", task: Task) -> None:
    """An interrupt came while a task was registered: it counts as cancelled, and nothing waits for it."""
    if scheduler.unfinished.pop(task.sequence, None) is not None:
        scheduler.num_cancelled += 1
    elif task.sequence == scheduler.num_pushed:
        scheduler.num_pushed -= 1
    if task.record.keeps_order:
        task.record.runner.forget(task)
    task.is_done = task.is_taken = True
    restore(scheduler.pacing, task, was_pushed=True)


def complete(scheduler: "Scheduler", task: Task, error: BaseException | None) -> None:
    """An interrupt came while a task was released: do the rest. What is ready is left to `settle`."""
    if error is not None or task.error is not None:
        scheduler.fail(task, error)
    elif task.record.is_control:
        task.fn()
    for variable in task.writes:
        variable.error = task.error or variable.error
    task.is_done = True
    task.fn = nothing
    scheduler.unfinished.pop(task.sequence, None)
    restore(scheduler.pacing, task, was_pushed=False)
    if not scheduler.unfinished:
        open_gates(scheduler.idle_gates)


def settle(scheduler: "Scheduler", pushed: Task | None) -> None:
    """Start what nobody will start, after an interrupt; runs apart.

    Args:
        scheduler: The engine's.
        pushed: The task whose push was interrupted. In the pushing thread it would have run: it is
            cancelled unless it has begun, for its turn may come long after.
    """
    with scheduler.lock:
        if pushed is not None and pushed.record.is_inline and not pushed.is_taken:
            pushed.gate = None
            pushed.has_starter = False
            if not pushed.record.is_control:
                pushed.is_cancelled = True
                pushed.error = pushed.error or failures.cancellation(pushed)
        idle = [
            task
            for task in scheduler.unfinished.values()
            if not (task.waits or task.is_taken or task.has_starter or task.gate)
        ]
    if idle:
        scheduler.start_all(idle)


def restore(pacing: "Pacing", task: Task, *, was_pushed: bool) -> None:
    """Make the state of all variables anew from the unfinished tasks; called under the engine's lock.

    Who holds a variable and who waits for it follows from the order of the pushes: the first write
    holds it, or all reads before it.

    Args:
        pacing: Whose `unfinished` holds what is still to come.
        task: The one at whose push or end the interrupt came.
        was_pushed: It came at the push, so that the counts of finished writes are right; otherwise
            those of pushed ones are.
    """
    variables: dict[Variable, tuple[int, int]] = {}
    for other in (task, *pacing.unfinished.values()):
        for variable in (*other.reads, *other.writes):
            variables.setdefault(variable, (variable.version, variable.pushed_writes))
    for variable in variables:
        variable.queue.clear()
        variable.readers = variable.pushed_writes = 0
        variable.writer = None
    for other in pacing.unfinished.values():
        other.waits = sum(variable.append(other, is_write=False) for variable in other.reads)
        other.waits += sum(variable.append(other, is_write=True) for variable in other.writes)
    for variable, (version, pushed_writes) in variables.items():
        num_unfinished = variable.pushed_writes
        variable.version = version if was_pushed else pushed_writes - num_unfinished
        variable.pushed_writes = variable.version + num_unfinished
        variable.wake()
    for other in pacing.unfinished.values():
        if not other.waits and not other.is_taken:
            inherit_error(other)
            if other.gate is not None:
                open_gates([other.gate])
    pacing.restore()


def inherit_error(task: Task) -> None:
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
