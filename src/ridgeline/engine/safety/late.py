"""Pushes that came while their own thread held the engine's lock: made, in order, once it does not."""

import threading
from _thread import start_new_thread
from collections import deque
from contextlib import suppress
from typing import Any

from ridgeline.engine.apart import apart
from ridgeline.engine.middle import SchedulerView, makes_late_pushes
from ridgeline.engine.task import EngineTask

LATE = -1
"""Number of a task that was taken and will be registered, whatever the bounds and whoever closes by then."""


class LatePushes:
    """Those of one engine; `tasks` are not registered yet, in the order of their pushes."""

    def __init__(self, scheduler: SchedulerView) -> None:
        self._scheduler = scheduler
        self.process = scheduler.process
        self.tasks: deque[EngineTask] = deque()
        self._lock: Any = threading.RLock()

    def add(self, task: EngineTask) -> None:
        """Take a task; another thread registers it, once this one has left the lock."""
        task.sequence = LATE
        self.tasks.append(task)
        start_new_thread(self._register_all, ())

    def register(self) -> None:
        """Have all registered before this returns: what comes after is pushed after them."""
        if not self._lock._is_owned():  # noqa: SLF001 - a finalizer may come while this thread does it
            apart(self._register_all)

    @makes_late_pushes
    def _register_all(self) -> None:
        scheduler = self._scheduler
        while True:
            with self._lock:
                if not self.tasks:
                    return
                task = self.tasks[0]
                waits = scheduler.register(task)
                self.tasks.popleft()
            # What a function raises would be that of its pusher, who has gone on; its variables have it.
            with suppress(BaseException):
                scheduler.start(task, waits)
