"""How a variable is waited for, and which tasks wait at present, of all engines.

Engines may wait for each other through their tasks: for variables, for the end of all tasks, or for room. A
task notes its wait before it looks for a cycle, so that of several the last one sees all.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from ridgeline.engine.apart import apart
from ridgeline.engine.middle import check_can_sleep, check_unlocked
from ridgeline.engine.safety.cycles import Blocked, Need, check_ends, find_cycle, version_of
from ridgeline.engine.safety.mending import mend
from ridgeline.engine.safety.scheduler_core import SchedulerCore
from ridgeline.engine.task import EngineTask, Variable, closed_gate, here
from ridgeline.engine.variable import check_alive
from ridgeline.errors import EngineError

_blocked: dict[EngineTask, tuple[SchedulerCore, Blocked]] = {}
os.register_at_fork(after_in_child=_blocked.clear)  # the child has none of these threads


def wait_for(scheduler: SchedulerCore, variable: Variable) -> None:
    """Sleep until the writes of `variable` pushed so far are done; see `Engine.wait`."""
    check_unlocked(scheduler, "wait")
    if scheduler.late.tasks:
        scheduler.late.register()
    gate = None
    task = here.task
    try:
        while True:
            with scheduler.lock:
                check_alive(variable, "wait")
                if scheduler.half_done is None:
                    if variable.version < variable.pushed_writes:
                        check_can_sleep(scheduler, "wait")
                        if task is not None:
                            _blocked[task] = scheduler, Blocked(version_of(variable), here.agenda)
                            _check(task, variable, [scheduler])
                        # Under the lock, as the version is: a write that ends in between would find nobody
                        # to wake.
                        gate = closed_gate()
                        variable.waiters.append((variable.pushed_writes, gate))
                    break
            apart(mend, scheduler)
        if gate is not None:
            # Waits within one engine were looked at under its lock already.
            if task is not None:
                _across(lambda schedulers: _check(task, variable, schedulers))
            gate.acquire()
    finally:
        if task is not None:
            _blocked.pop(task, None)


@contextlib.contextmanager
def blocked_by(scheduler: SchedulerCore, what: str, *, all_of_them: bool = True) -> Iterator[None]:
    """The present task, if one runs, sleeps inside until tasks of an engine are done; else an EngineError."""
    task = here.task
    if task is None:
        yield
        return
    try:
        cycle = _cycle(scheduler, task, all_of_them=all_of_them)
        if cycle:
            raise EngineError(
                f"wanted a wait that can end, got {what} in task {task.name!r}, which would wait for itself: "
                f"{'; '.join(cycle)}; push a task that reads what is awaited instead of waiting"
            )
        yield
    finally:
        _blocked.pop(task, None)


def has_no_end(scheduler: SchedulerCore) -> bool:
    """Whether the present task, which waits for room in another engine, would wait for itself.

    It counts as one that waits until its thread has pushed: see `pushed`.
    """
    task = here.task
    return task is not None and bool(_cycle(scheduler, task, all_of_them=False))


def pushed() -> None:
    """The present task has room."""
    if here.task is not None:
        _blocked.pop(here.task, None)


def _cycle(scheduler: SchedulerCore, task: EngineTask, *, all_of_them: bool) -> list[str]:
    """Note that a task waits for all tasks of an engine, or one; who waits for whom, if that has no end."""
    unfinished = scheduler.unfinished
    why = "the end of" if all_of_them else "room, taken by"
    need: Callable[[], Need] = lambda: Need(list(unfinished.values()), all_of_them, why)  # noqa: E731
    _blocked[task] = scheduler, Blocked(need, here.agenda)
    found: list[str] = []
    _across(lambda schedulers: found.extend(_find(task, schedulers)))
    return found


def _engines() -> set[SchedulerCore]:
    return {scheduler for scheduler, _ in list(_blocked.values())}


def _across(look: Callable[[list[SchedulerCore]], None]) -> None:
    """Look at all engines that tasks wait for, if there are several; apart, for it takes all their locks."""
    engines = _engines()
    # A finalizer may have come while this thread holds the lock of one of them.
    if len(engines) > 1 and not any(scheduler.owns_lock() for scheduler in engines):
        apart(_look, look)


def _look(look: Callable[[list[SchedulerCore]], None]) -> None:
    # In one order everywhere, or two could wait for each other.
    schedulers = sorted(_engines(), key=id)
    while True:
        for scheduler in schedulers:
            mend(scheduler)
        with ExitStack() as stack:
            for scheduler in schedulers:
                stack.enter_context(scheduler.lock)
            if all(scheduler.half_done is None for scheduler in schedulers):
                look(schedulers)
                return


def _find(task: EngineTask, schedulers: list[SchedulerCore]) -> list[str]:
    return find_cycle(task, _unfinished(schedulers), _waits(schedulers))


def _check(task: EngineTask, variable: Variable, schedulers: list[SchedulerCore]) -> None:
    """Refuse a wait that cannot end, as far as these engines know, whose locks are held."""
    check_ends(task, variable, _unfinished(schedulers), _waits(schedulers))


def _unfinished(schedulers: list[SchedulerCore]) -> list[EngineTask]:
    return [other for scheduler in schedulers for other in list(scheduler.unfinished.values())]


def _waits(schedulers: list[SchedulerCore]) -> dict[EngineTask, Blocked]:
    return {other: wait for other, (owner, wait) in list(_blocked.items()) if owner in schedulers}
