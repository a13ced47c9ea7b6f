"""Worker threads that serve one lane from one queue of ready tasks."""

import heapq
import threading
from collections import deque
from collections.abc import Callable

from ridgeline.engine.lanes.lanes import call, call_on_host
from ridgeline.engine.middle import own
from ridgeline.engine.process import Process, end_child
from ridgeline.engine.task import EngineTask, closed_gate, open_gates

FinishAndNext = Callable[[EngineTask, BaseException | None], EngineTask | None]
"""Like `Finish`; returns a task of the same lane that became ready by it, which is then not started."""

Recover = Callable[[EngineTask | None, BaseException], None]
"""`recover(task, error)`: an exception reached a lane's thread outside of a task's function; `task` is what
it had begun."""


class ThreadLane:
    """A number of worker threads.

    Ready tasks run by priority, higher first, then as they became ready. A queue serves priority 0,
    which almost all have: its append and popleft are single instructions of the interpreter and need no
    lock. A heap under a lock serves the others.

    A worker that finishes a task continues with what became ready by it, without waking anyone.

    No exception ends a worker. One may come anywhere: from a thread that ends what takes too long
    (`PyThreadState_SetAsyncExc`), or where no memory is left. What the worker had begun then fails by it; a
    task that it had only taken is put back.
    """

    runs_inline = False

    def __init__(
        self,
        finish: FinishAndNext,
        recover: Recover,
        process: Process,
        name: str,
        *,
        num_threads: int = 1,
    ) -> None:
        self._finish = finish
        self._recover = recover
        self.process = process
        self._name = name
        self.num_threads = num_threads
        self._queue: deque[EngineTask] = deque()
        # Iterating pops without a call, behind which an exception could come and lose the task.
        self._pops = iter(self._queue.popleft, None)
        self._heap: list[tuple[int, int, EngineTask]] = []
        self._lock = threading.RLock()  # see `Scheduler.lock`
        self._sleepers: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        self._runs: list[threading.Lock] = []  # held by a thread while it runs
        self._is_closed = False

    def enqueue(self, task: EngineTask) -> None:
        """Nothing to prepare."""

    def forget(self, task: EngineTask) -> None:
        """Nothing to undo."""

    def start(self, task: EngineTask) -> None:
        """Hand the task to the threads; one is woken if one sleeps."""
        if task.priority:
            self._put_urgent(task)
        else:
            self._queue.append(task)
        # Read after the task is there; a thread looks again after it is among the sleepers.
        if self._sleepers:
            self._wake()
        task.has_starter = True  # last: after an interrupt before this, it is started again

    def withdraw(self, task: EngineTask) -> bool:
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

    def open(self) -> None:
        """Start the threads, apart; a RuntimeError where the system has no more."""
        for index in range(self.num_threads):
            name = f"ridgeline-{self._name}" + (f"-{index}" if index else "")
            runs = closed_gate()
            thread = threading.Thread(target=self._run, args=(index, runs), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
            self._runs.append(runs)

    def close(self) -> None:
        """Let the threads finish what is ready, then end."""
        with self._lock:
            self._is_closed = True
            open_gates(self._sleepers)

    def await_end(self) -> None:
        """Wait until the threads have ended.

        A `join` that is interrupted takes a thread that runs for one that has ended: so it comes last.
        """
        for runs in self._runs:
            with runs:
                pass
        for thread in self._threads:
            thread.join()

    def _run(self, index: int, runs: threading.Lock) -> None:
        held: list[EngineTask | None] = [None]
        gate = closed_gate()
        error: BaseException | None = None
        try:
            while True:
                try:
                    if error is not None:
                        gate = self._go_on(gate, held[0], error)
                        error = None
                    self._serve(index, gate, held)
                    return
                except BaseException as raised:  # noqa: BLE001 - the lane has no other thread
                    error = raised
        finally:
            runs.release()

    def _go_on(
        self, gate: threading.Lock, task: EngineTask | None, error: BaseException
    ) -> threading.Lock:
        """Repair what an exception cut short; the gate to sleep at from now on."""
        with self._lock:
            if gate in self._sleepers:
                self._sleepers.remove(gate)
            if task is not None and not task.is_taken:
                if not task.priority:
                    self._queue.appendleft(task)
                elif all(entry[2] is not task for entry in self._heap):
                    heapq.heappush(self._heap, (-task.priority, task.sequence, task))
        self._recover(task if task is not None and task.is_taken else None, error)
        return closed_gate()

    @own
    def _serve(self, index: int, gate: threading.Lock, held: "list[EngineTask | None]") -> None:
        """Run tasks until the end; `held` gets the one that this thread has at present."""
        ready: EngineTask | None = None
        while (task := self._take(ready, gate, held)) is not None:
            ready = None
            if task.is_taken:  # started twice, since an interrupt left in doubt whether it was
                held[0] = None
                continue
            held[0] = task
            task.is_taken = True
            if self.num_threads > 1:
                task.index = index
            error = (call_on_host if task.reads or task.writes else call)(task)
            ready = self._finish(task, error)
            if self.process.is_forked:
                end_child(error)
            # Asleep, a thread would keep an error, and by its traceback what the task's frames hold.
            held[0] = task = error = None

    def _take(
        self, ready: EngineTask | None, gate: threading.Lock, held: "list[EngineTask | None]"
    ) -> EngineTask | None:
        """The next task to run, `ready` or one before it; None at the end. Sleeps until there is one."""
        queue = self._queue
        if ready is not None:
            # Nothing waits that could come first, so the queue is not needed.
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
                        held[0] = self._heap[0][2]
                        heapq.heappop(self._heap)
                        return held[0]
            if queue:
                try:
                    for held[0] in self._pops:
                        return held[0]
                except IndexError:  # another thread was faster
                    continue
            if not self._sleep(gate):
                return None

    def _put_urgent(self, task: EngineTask) -> None:
        with self._lock:
            heapq.heappush(self._heap, (-task.priority, task.sequence, task))

    def _wake(self) -> None:
        """Wake one thread. The gate opens first: an interrupt before it is taken out then costs no wake-up.

        A signal handler or finalizer that comes here meanwhile may wake the same one: then another is woken.
        """
        with self._lock:
            while self._sleepers:
                gate = self._sleepers[-1]
                if gate.locked():
                    gate.release()
                if gate in self._sleepers:
                    self._sleepers.remove(gate)
                    return

    def _sleep(self, gate: threading.Lock) -> bool:
        """Sleep until there may be a task; False at the end."""
        with self._lock:
            self._sleepers.append(gate)
            if self._queue or self._heap or self._is_closed:
                if (
                    gate in self._sleepers
                ):  # a finalizer's push may have taken it out, and opened it
                    self._sleepers.remove(gate)
                return bool(self._queue or self._heap)
        gate.acquire()
        if gate in self._sleepers:  # who woke this thread was interrupted
            with self._lock:
                if gate in self._sleepers:
                    self._sleepers.remove(gate)
        return True
