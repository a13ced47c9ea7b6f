"""What an interrupt left half done: a push is undone, the end of a task completed, and what is ready started.

The unfinished tasks in the order of their pushes are the one record that holds at every moment; the state of
variables and counts is made again from them. Everything here runs apart.
"""

from ridgeline.engine import failures
from ridgeline.engine.lanes.lanes import InlineLane
from ridgeline.engine.pacing import Pacing
from ridgeline.engine.safety.scheduler_core import SchedulerCore
from ridgeline.engine.task import EngineTask, Variable, nothing, open_gates


def mend(scheduler: SchedulerCore) -> None:
    """Undo or complete the change that an interrupt cut short, if there is one."""
    dropped = None
    with scheduler.lock:
        if scheduler.half_done is not None:
            action, *arguments = scheduler.half_done
            dropped = action(scheduler, *arguments)
            scheduler.half_done = None
    del dropped  # without the lock: what a user's function holds may push when it goes


def undo_push(scheduler: SchedulerCore, task: EngineTask) -> None:
    """The task was being registered: it has not been pushed."""
    if task.record.keeps_order:
        task.record.runner.forget(task)
    # It is not in `unfinished` yet, so what is made again from there is without it.
    restore(scheduler.pacing, task, was_pushed=True)


def complete(
    scheduler: SchedulerCore, task: EngineTask, error: BaseException | None
) -> tuple[object, ...]:
    """The task was being released: do the rest. `settle` starts what is ready; drop the result unlocked."""
    fn, cleared = task.fn, None
    if error is not None or task.error is not None:
        scheduler.fail(task, error)
    elif task.record.is_control:
        cleared = task.fn()
    for variable in task.writes:
        variable.error = task.error or variable.error
    task.is_done = True
    task.fn = nothing
    scheduler.unfinished.pop(task.sequence, None)
    restore(scheduler.pacing, task, was_pushed=False)
    if not scheduler.unfinished:
        open_gates(scheduler.idle_gates)
    return fn, cleared


def settle(scheduler: SchedulerCore, pushed: EngineTask | None) -> None:
    """Repair, then start what no other thread will start.

    The task whose push was interrupted would have run in the pushing thread: it is cancelled unless it has
    begun, for its turn may come long after.
    """
    mend(scheduler)
    for record in (*list(scheduler.lanes.records.values()), scheduler.lanes.control):
        runner = record.runner
        if isinstance(runner, InlineLane):
            while runner.cut_short:
                task, error = runner.cut_short.popleft()
                scheduler.finish(task, error)
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


def restore(pacing: Pacing, task: EngineTask, *, was_pushed: bool) -> None:
    """Make the state of all variables again from the unfinished tasks; called under the engine's lock.

    Who holds a variable and who waits for it follows from the order of the pushes: the first write
    holds it, or all reads before it.

    The interrupt came at the push or at the end of `task`. Where it was pushed, the counts of finished writes
    are right, else those of pushed ones.
    """
    variables: dict[Variable, tuple[int, int]] = {}
    for other in (task, *pacing.unfinished.values()):
        for variable in (*other.reads, *other.writes):
            variables.setdefault(variable, (variable.version, variable.pushed_writes))
    for variable in variables:
        # Nothing of a half-made change is kept: what is left is replayed as if pushed again.
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


def inherit_error(task: EngineTask) -> None:
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
