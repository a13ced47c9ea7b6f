"""How an engine ends that was not closed, and the failures that were not reported by then."""

import sys
import threading
import weakref
from _thread import start_new_thread
from typing import Any

from ridgeline.engine import failures
from ridgeline.engine.lanes.threads import ThreadLane
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.task import closed_gate
from ridgeline.errors import EngineError


def end_behind(scheduler: Scheduler) -> None:
    """End an engine that was not closed: one that was dropped, or any at the end of the interpreter.

    One that was dropped finishes what is pending and ends its threads without holding up who dropped it; the
    end of the interpreter waits for that. At that end itself it is done here and now.

    Raises:
        EngineError: a task failed and its error was not raised yet, or the interpreter ends and tasks remain
            that others have to finish (see `Engine.drop_at_exit`); Python prints it.
    """
    if scheduler.process.is_forked or not (_has_threads(scheduler) or _waits_for_others(scheduler)):
        return
    if threading.main_thread().is_alive():
        # Who drops an engine may hold any lock, for it may be the garbage collector's turn: so no waiting.
        over = closed_gate()
        ending = weakref.finalize(scheduler, _end_at_exit, scheduler, over)
        start_new_thread(_end_apart, (scheduler, over, ending))
    else:
        _end_at_exit(scheduler, None)


def tell_untold(scheduler: Scheduler) -> None:
    """Raise an EngineError if there are failures that were not raised yet."""
    with scheduler.lock:
        untold, num_counted = scheduler.failures.take_untold()
    if untold:
        failures.tell(untold[0], others=len(untold) - 1 + num_counted, only_counted=num_counted)


def _end_apart(
    scheduler: Scheduler, over: threading.Lock, ending: "weakref.finalize[..., Any]"
) -> None:
    """End it in a thread without a name, which must not join others: it would be listed for good."""
    scheduler.shut(waits=False)
    try:
        tell_untold(scheduler)
    except EngineError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    ending.detach()
    over.release()


def _end_at_exit(scheduler: Scheduler, over: "threading.Lock | None") -> None:
    """End it, or wait until the thread that does so is over; no wait for other workers."""
    if _waits_for_others(scheduler):
        if scheduler.drops_at_exit:
            return
        raise EngineError(
            f"wanted an engine that is closed before the interpreter ends, got one with "
            f"{len(scheduler.unfinished)} unfinished tasks and collectives among them, which are dropped "
            "since a worker that has gone would be waited for; call close()"
        )
    if over is None:
        scheduler.shut()
        tell_untold(scheduler)
    else:
        with over:
            pass


def _has_threads(scheduler: Scheduler) -> bool:
    """Whether there are threads of its lanes, which have to be ended."""
    return any(isinstance(r.runner, ThreadLane) for r in list(scheduler.lanes.records.values()))


def _waits_for_others(scheduler: Scheduler) -> bool:
    """A task is pending on a lane whose work other processes have to join, such as a collective."""
    return any(task.record.keeps_order for task in list(scheduler.unfinished.values()))
