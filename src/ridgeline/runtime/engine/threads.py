"""Worker threads that serve one lane from one queue of ready tasks."""

import heapq
import threading
from collections import deque
from collections.abc import Callable

from ridgeline.runtime.engine.lanes import call, call_on_host
from ridgeline.runtime.engine.task import Task

FinishAndNext = Callable[[Task, BaseException | None], Task | None]
"""Like `Finish`; returns a task of the same lane that became ready by it, which is then not started."""


class ThreadLane:
    """A number of worker threads, started by the first task.

    Ready tasks run by priority, higher first, then as they became ready. A queue serves priority 0,
    which almost all have: its append and popleft are single instructions of the interpreter and need no
    lock. A heap under a lock serves the others.

    A worker that finishes a task goes on with what became ready by it, without waking anyone.
    """

    runs_inline = False

    def __init__(self, finish: FinishAndNext, name: str, *, num_threads: int = 1) -> None:
        self._finish = finish
        self._name = name
        self._num_threads = num_threads
        self._queue: deque[Task] = deque()
        self._heap: list[tuple[int, int, Task]] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def enqueue(self, task: Task) -> None:
        """Nothing to prepare."""

    def start(self, task: Task) -> None:
        """Hand the task to the threads; one is woken if one sleeps."""
        if not self._threads:
            self._start_threads()
        if task.priority:
            self._put_urgent(task)
        else:
            self._queue.append(task)
        # Read after the task is there; a thread looks again after it counted itself as idle.
        if self._num_idle:
            with self._lock:
                if self._num_idle:
                    self._num_idle -= 1
                    self._changed.notify()

    def withdraw(self, task: Task) -> bool:
        """Take back a task; True if no thread has taken it."""
        try:
            if not task.priority:
                self._queue.remove(task)
                return True
            with self._lock:
                self._heap.remove((-task.priority, task.sequence, task))
                heapq.heapify(self._heap)
                return True
        except ValueError:
            return False

    def close(self) -> None:
        """Let the threads finish what is ready, then end them."""
        with self._lock:
            self._is_closed = True
            self._num_idle = 0
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start_threads(self) -> None:
        with self._lock:
            for index in range(len(self._threads), self._num_threads):
                name = f"ridgeline-{self._name}" + (f"-{index}" if index else "")
                thread = threading.Thread(target=self._run, args=(index,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _run(self, index: int) -> None:
        ready: Task | None = None
        while (task := self._take(ready)) is not None:
            if self._num_threads > 1:
                task.index = index
            run = call_on_host if task.reads or task.writes else call
            ready = self._finish(task, run(task))

    def _take(self, ready: Task | None) -> Task | None:
        """The next task to run, `ready` or one before it; None at the end. Sleeps until there is one."""
        queue = self._queue
        if ready is not None:
            if not queue and not self._heap:
                return ready
            if ready.priority:
                self._put_urgent(ready)
            else:
                queue.append(ready)
        while True:
            if self._heap:
                with self._lock:
                    if self._heap and (not queue or self._heap[0][0] < 0):
                        return heapq.heappop(self._heap)[2]
            if queue:
                try:
                    return queue.popleft()
                except IndexError:  # another thread was faster
                    continue
            if not self._sleep():
                return None

    def _put_urgent(self, task: Task) -> None:
        with self._lock:
            heapq.heappush(self._heap, (-task.priority, task.sequence, task))

    def _sleep(self) -> bool:
        """Sleep until there may be a task; False at the end."""
        with self._lock:
            self._num_idle += 1
            if self._queue or self._heap:
                self._num_idle -= 1
            elif self._is_closed:
                return False
            else:
                self._changed.wait()
            return True
