"""How far pushes may run ahead: tasks and bytes that are unfinished, and mini-batches.

Source: the queue of an asynchronous front end grows without bound unless it is synchronised, "once
per mini-batch" by custom (Zhang et al., Dive into Deep Learning, section 12.2).
"""

import threading
import time
from collections import deque

from ridgeline.engine.arguments import whole_number
from ridgeline.engine.task import EngineTask, closed_gate, open_gates

RECHECK_S = 0.005
"""A blocked push looks by itself after this time; woken for every finished task it would cost more."""


class Pacing:
    """Knows what is unfinished and blocks those who push too much. Used under the engine's lock.

    A blocked push is woken once a quarter of the bound is free, so that it can push many at once; at
    latest after `RECHECK_S` it takes whatever room there is. Who waits does so at a gate, a plain lock,
    outside the engine's lock: an interrupt in `threading.Condition.wait` may leave its lock released.

    Args:
        max_pending: Tasks that may be unfinished.
        max_bytes: Bytes that may be unfinished; None: any. A single task of more runs alone.
        max_batches: Ended batches that may be unfinished; each is kept as the number of its last push
            and the number of its tasks that are unfinished.

    Attributes:
        unfinished: The tasks by number, in the order of their pushes. What variables and counts say
            follows from it, and is made again from it where an interrupt left it half changed.
        is_watched: A thread is blocked, or a batch has ended: every task that is done has to be reported.

    Raises:
        EngineError: a bound is no whole number from 1 on.
    """

    def __init__(self, *, max_pending: int, max_bytes: int | None, max_batches: int) -> None:
        where = "Engine(...)"
        self.max_pending = whole_number("max_pending", max_pending, where, least=1)
        self._max_bytes = (
            None if max_bytes is None else whole_number("max_bytes", max_bytes, where, least=1)
        )
        self._max_batches = whole_number("max_batches", max_batches, where, least=1)
        # Woken for a single free place, a pusher would sleep and wake once per task.
        self._wake_at = self.max_pending - max(1, self.max_pending // 4)
        self._room: list[threading.Lock] = []
        self._batch_done: list[threading.Lock] = []
        self._batches: deque[list[int]] = deque()
        self.unfinished: dict[int, EngineTask] = {}
        self.is_watched = False
        self.bytes = 0
        self.most_pending = 0
        self.most_bytes = 0
        self.blocked_s = 0.0

    def has_room(self, num_bytes: int) -> bool:
        """A task of this size may be pushed now."""
        if len(self.unfinished) >= self.max_pending:
            return False
        return (
            self._max_bytes is None or not self.bytes or self.bytes + num_bytes <= self._max_bytes
        )

    def room_gate(self, gate: "threading.Lock | None") -> threading.Lock:
        """The gate at which a push waits for room: `gate`, or a new one."""
        if gate is None:
            gate = closed_gate()
        # Before it is there, so that an interrupt in between loses no wake-up.
        self.is_watched = True
        if gate not in self._room:
            self._room.append(gate)
        return gate

    def enter_bytes(self, num_bytes: int) -> None:
        """A task that holds memory was pushed."""
        self.bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.bytes)

    def leave(self, task: EngineTask) -> None:
        """A task is done and no more in `unfinished`; needed if it has bytes, or `is_watched`."""
        self.bytes -= task.num_bytes
        if self._room and (len(self.unfinished) <= self._wake_at or task.num_bytes):
            open_gates(self._room)
            self._watch()
        for batch in self._batches:
            if task.sequence <= batch[0]:
                batch[1] -= 1
                if not batch[1]:
                    self._batches.remove(batch)
                    open_gates(self._batch_done)
                    self._watch()
                return

    def end_batch(self, last: int) -> None:
        """End a batch with the push number `last`."""
        # Pushes are numbered in order, so that what no earlier batch has counted belongs to this one.
        count = len(self.unfinished) - sum(count for _, count in self._batches)
        if count:
            self.is_watched = True
            self._batches.append([last, count])

    def batch_gate(self) -> "threading.Lock | None":
        """The gate at which to wait while too many batches are unfinished; None if there are not."""
        if len(self._batches) <= self._max_batches:
            return None
        gate = closed_gate()
        self._batch_done.append(gate)
        return gate

    def wait_at(self, gate: threading.Lock, timeout_s: float = -1) -> None:
        """Sleep until the gate is opened; called without the lock."""
        begin = time.perf_counter()
        try:
            gate.acquire(timeout=timeout_s)
        finally:
            self.blocked_s += time.perf_counter() - begin

    def restore(self) -> None:
        """Count again what is unfinished, and wake the threads that may continue."""
        self.bytes = sum(task.num_bytes for task in self.unfinished.values())
        numbers = list(self.unfinished)
        first = 0
        for batch in self._batches:
            batch[1] = sum(first < number <= batch[0] for number in numbers)
            first = batch[0]
        self._batches = deque(batch for batch in self._batches if batch[1])
        open_gates(self._room)
        open_gates(self._batch_done)
        self._watch()

    def _watch(self) -> None:
        self.is_watched = bool(self._room or self._batches)
