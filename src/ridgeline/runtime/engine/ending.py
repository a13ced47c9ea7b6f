"""How an engine ends that nobody closed, and what nobody has been told of when it does."""

import threading

from ridgeline.errors import EngineError
from ridgeline.runtime.engine import failures
from ridgeline.runtime.engine.scheduler import Scheduler


def end_behind(scheduler: Scheduler) -> None:
    """End an engine that nobody closed: one that was dropped, or any at the end of the interpreter.

    One that was dropped finishes what is pending and ends its threads without holding up who dropped it,
    in a thread for which the end of the interpreter waits. At that end itself it is done here and now.

    Raises:
        EngineError: the interpreter ends, and a task failed and nobody has been told yet, or tasks remain
            that others have to finish; Python prints it.
    """
    has_threads = scheduler.has_threads
    waits_for_others = not scheduler.process.is_forked and scheduler.waits_for_others
    if not has_threads and not waits_for_others:
        return
    if threading.main_thread().is_alive():
        if not has_threads:
            return
        threading.Thread(
            target=scheduler.shut, name="ridgeline-ending", daemon=waits_for_others
        ).start()
    elif waits_for_others:
        raise EngineError(
            f"wanted an engine that is closed before the interpreter ends, got one with "
            f"{len(scheduler.unfinished)} unfinished tasks and collectives among them, which are dropped "
            "since a worker that has gone would be waited for; call close()"
        )
    else:
        scheduler.shut()
        tell_untold(scheduler)


def tell_untold(scheduler: Scheduler) -> None:
    """Tell of failures that nobody has been told of.

    Raises:
        EngineError: there are some.
    """
    with scheduler.lock:
        untold, num_counted = scheduler.failures.take_untold()
    if untold:
        failures.tell(untold[0], others=len(untold) - 1 + num_counted, only_counted=num_counted)
