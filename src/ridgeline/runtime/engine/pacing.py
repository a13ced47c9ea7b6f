"""How far pushes may run ahead: tasks and bytes that are unfinished, and mini-batches.

Source: the queue of an asynchronous front end grows without bound unless it is synchronised, "once
per mini-batch" by custom (Zhang et al., Dive into Deep Learning, section 12.2).
"""

import threading
import time
from collections import deque

from ridgeline.errors import EngineError
from ridgeline.runtime.engine.task import Task

RECHECK_S = 0.005
"""A blocked push looks by itself after this time; woken for every finished task it would cost more."""


class Pacing:
    """Counts what is unfinished and blocks those who push too much. Used under the engine's lock.

    A blocked push is woken once a quarter of the bound is free, so that it can push many at once; at
    latest after `RECHECK_S` it takes whatever room there is. `is_watched`: somebody is blocked, or a
    batch has ended, so that every task that is done has to be told. The scheduler itself counts
    `pending`, since that happens at every task.

    Args:
        lock: The engine's.
        max_pending: Tasks that may be unfinished.
        max_bytes: Bytes that may be unfinished; None: any. A single task of more runs alone.
        max_batches: Ended batches that may be unfinished; each is kept as the number of its last push
            and the number of its tasks that are unfinished.

    Raises:
        EngineError: a bound is below 1.
    """

    def __init__(
        self, lock: threading.Lock, *, max_pending: int, max_bytes: int | None, max_batches: int
    ) -> None:
        for name, value in (
            ("max_pending", max_pending),
            ("max_bytes", max_bytes),
            ("max_batches", max_batches),
        ):
            if value is not None and value < 1:
                raise EngineError(f"wanted {name} >= 1, got {value} in Engine(...); raise it")
        self.max_pending = max_pending
        self._max_bytes = max_bytes
        self._max_batches = max_batches
        self._wake_at = max_pending - max(1, max_pending // 4)
        self._room = threading.Condition(lock)
        self._batch_done = threading.Condition(lock)
        self._has_blocked = False
        self._batches: deque[list[int]] = deque()
        self.is_watched = False
        self.pending = 0
        self.bytes = 0
        self.most_pending = 0
        self.most_bytes = 0
        self.blocked_s = 0.0

    def has_room(self, num_bytes: int) -> bool:
        """A task of this size may be pushed now."""
        if self.pending >= self.max_pending:
            return False
        return (
            self._max_bytes is None or not self.bytes or self.bytes + num_bytes <= self._max_bytes
        )

    def await_room(self, num_bytes: int) -> None:
        """Block until there is room; the lock is free meanwhile."""
        begin = time.perf_counter()
        try:
            while not self.has_room(num_bytes):
                self._has_blocked = self.is_watched = True
                self._room.wait(RECHECK_S)
        finally:
            self.blocked_s += time.perf_counter() - begin

    def enter_bytes(self, num_bytes: int) -> None:
        """A task that holds memory was pushed."""
        self.bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.bytes)

    def leave(self, task: Task) -> None:
        """A task is done and `pending` counts it no more; needed if it has bytes, or `is_watched`."""
        self.bytes -= task.num_bytes
        if self._has_blocked and (self.pending <= self._wake_at or task.num_bytes):
            self._has_blocked = False  # not again for every task until they have run
            self._room.notify_all()
            self._watch()
        for batch in self._batches:
            if task.sequence <= batch[0]:
                batch[1] -= 1
                if not batch[1]:
                    self._batches.remove(batch)
                    self._batch_done.notify_all()
                    self._watch()
                return

    def end_batch(self, last: int, *, blocks: bool) -> None:
        """End a batch with the push number `last`; block while too many batches are unfinished."""
        unfinished = self.pending - sum(count for _, count in self._batches)
        if unfinished:
            self._batches.append([last, unfinished])
            self._watch()
        if not blocks or len(self._batches) <= self._max_batches:
            return
        begin = time.perf_counter()
        try:
            while len(self._batches) > self._max_batches:
                self._batch_done.wait()
        finally:
            self.blocked_s += time.perf_counter() - begin

    def _watch(self) -> None:
        self.is_watched = bool(self._has_blocked or self._batches)
