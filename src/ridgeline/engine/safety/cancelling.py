"""How a task is kept from running."""

from ridgeline.engine import failures
from ridgeline.engine.apart import apart
from ridgeline.engine.lanes.threads import ThreadLane
from ridgeline.engine.middle import check_unlocked, own
from ridgeline.engine.safety.mending import mend
from ridgeline.engine.safety.repaired import Repaired
from ridgeline.engine.task import EngineTask


@own
def cancel(scheduler: Repaired, task: EngineTask) -> bool:
    """Keep a task from running unless it has begun; see `Engine.cancel`."""
    error = failures.cancellation(task)
    check_unlocked(scheduler, "cancel")
    while True:
        with scheduler.lock:
            if task.is_done or task.error is not None:
                return False
            if scheduler.half_done is None:
                # First: taken out of its queue, it may have to be started again.
                task.has_starter = False
                runner = task.record.runner
                was_ready = not task.waits
                if was_ready and not (isinstance(runner, ThreadLane) and runner.withdraw(task)):
                    return False
                task.is_cancelled = True
                task.error = error
                break
        apart(mend, scheduler)
    if was_ready:
        scheduler.finish(task, None)
    return True
