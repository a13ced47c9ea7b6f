"""How a variable is waited for, and which tasks wait at present, of all engines.

Two engines may wait for each other through their tasks. A task notes its wait before it looks for a cycle, so
that of several the last one sees all.
"""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ridgeline.engine.apart import apart
from ridgeline.engine.cycles import Blocked, check_ends
from ridgeline.engine.mending import mend
from ridgeline.engine.task import EngineTask, closed_gate, here
from ridgeline.engine.variable import Variable, check_alive

if TYPE_CHECKING:
    from ridgeline.engine.scheduler import Scheduler

_blocked: "dict[EngineTask, tuple[Scheduler, Blocked]]" = {}
os.register_at_fork(after_in_child=_blocked.clear)  # the child has none of these threads


def wait_for(scheduler: "Scheduler", variable: Variable) -> None:
    """Sleep until the writes of `variable` pushed so far are done; see `Engine.wait`."""
    gate = None
    task = here.task
    try:
        while True:
            with scheduler.lock:
                check_alive(variable, "wait")
                if scheduler.half_done is None:
                    if variable.version < variable.pushed_writes:
                        if task is not None:
                            wait = Blocked(variable, variable.pushed_writes, here.agenda)
                            _blocked[task] = scheduler, wait
                            _check(task, variable, [scheduler])
                        # Under the lock, as the version is: a write that ends in between would find nobody
                        # to wake.
                        gate = closed_gate()
                        variable.waiters.append((variable.pushed_writes, gate))
                    break
            apart(mend, scheduler)
        if gate is not None:
            # Waits within one engine were looked at under its lock already.
            if task is not None and len(_engines()) > 1:
                apart(_check_across, task, variable)
            gate.acquire()
    finally:
        if task is not None:
            _blocked.pop(task, None)


def _engines() -> "set[Scheduler]":
    return {scheduler for scheduler, _ in list(_blocked.values())}


def _check_across(task: EngineTask, variable: Variable) -> None:
    """Look at all engines for whose variables tasks wait; apart, for it takes all their locks."""
    schedulers = sorted(
        _engines(), key=id
    )  # in one order everywhere, or two could wait for each other
    while True:
        for scheduler in schedulers:
            mend(scheduler)
        with ExitStack() as stack:
            for scheduler in schedulers:
                stack.enter_context(scheduler.lock)
            if all(scheduler.half_done is None for scheduler in schedulers):
                _check(task, variable, schedulers)
                return


def _check(task: EngineTask, variable: Variable, schedulers: "list[Scheduler]") -> None:
    """Refuse a wait that cannot end, as far as these engines know, whose locks are held."""
    check_ends(
        task,
        variable,
        [other for scheduler in schedulers for other in list(scheduler.unfinished.values())],
        {other: wait for other, (owner, wait) in list(_blocked.items()) if owner in schedulers},
    )
