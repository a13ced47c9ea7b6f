"""The engine: push functions with the variables they read and write; it runs them in order.

The result equals running everything in push order, one by one; what does not depend on each other
runs side by side on different lanes.
"""

import functools
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from ridgeline.engine import failures
from ridgeline.engine.apart import apart
from ridgeline.engine.arguments import check_name, check_push
from ridgeline.engine.ending import end_behind, tell_untold
from ridgeline.engine.lanes.lanes import JoinableLane
from ridgeline.engine.lanes.threads import ThreadLane
from ridgeline.engine.middle import check_can_sleep, check_outside, check_unlocked, own
from ridgeline.engine.safety.mending import mend, settle
from ridgeline.engine.safety.waiting import blocked_by, pushed, wait_for
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.statistics import EngineStatistics
from ridgeline.engine.task import EngineTask, Finish, LaneRunner, Variable
from ridgeline.engine.variable import check_owner, check_variables
from ridgeline.errors import EngineError
from ridgeline.timeline import Span, Timeline

# Python has one empty tuple: a comparison by `is` costs no call.
_NO_VARIABLES: tuple[Variable, ...] = ()


class Engine:
    """Runs tasks on lanes in an order that respects the variables they read and write.

    A lane is a kind of `timeline.LANES`, or one of several of a kind: `copy-in:1`. `host` and
    `compute` run in the pushing thread; every other lane is a thread of its own, which ends with `close` or,
    if that is not called, when the engine is no longer referred to and its tasks are done. The end of the
    interpreter waits for pending tasks, but for collectives.

    Args:
        max_pending: Tasks that may be unfinished; a further push blocks, so that memory suffices.
        max_bytes: Likewise for the sum of their `num_bytes`; None sets no bound.
        max_batches: Batches that may be unfinished after `end_batch()`.
        threads: Worker threads by lane, which serve it from one queue; also for `host`, `compute`.
        lanes: Factories of special lanes, each given the engine's finish callback.
        serial: Run everything one by one in the pushing thread, to look for errors.

    Raises:
        EngineError: a bound is below 1, or a lane is unknown.

    Example:
        >>> with Engine() as engine:
        ...     total = engine.variable("total")
        ...     done = []
        ...     task = engine.push(lambda: done.append(1), writes=(total,), lane="loader")
        ...     engine.wait(total)
        >>> done
        [1]
    """

    def __init__(
        self,
        *,
        max_pending: int = 1024,
        max_bytes: int | None = None,
        max_batches: int = 2,
        threads: Mapping[str, int] = {},
        lanes: Mapping[str, Callable[[Finish], LaneRunner]] | None = None,
        serial: bool = False,
    ) -> None:
        self._scheduler = Scheduler(
            max_pending=max_pending,
            max_bytes=max_bytes,
            max_batches=max_batches,
            threads=threads,
            lanes={} if lanes is None else lanes,
            serial=serial,
        )
        # Threads know the scheduler, not the engine, so one that is dropped can be distinguished from one in
        # use.
        self._ending = weakref.finalize(self, end_behind, self._scheduler)

    def variable(self, name: str = "") -> Variable:
        """A new variable; the name serves messages and reports.

        Raises:
            EngineError: the name is no text.
        """
        check_name(name, "variable")
        return Variable(name or "variable", self._scheduler.owner)

    def push(
        self,
        fn: Callable[[], Any],
        reads: Sequence[Variable] = (),
        writes: Sequence[Variable] = (),
        *,
        lane: str = "host",
        name: str = "",
        priority: int = 0,
        num_bytes: int = 0,
    ) -> EngineTask:
        """Run `fn` on `lane` once everything pushed earlier that it depends on is done.

        A function that raises poisons the variables it writes: tasks that touch them are skipped,
        and `wait` raises the error. A task may push others. They never block at the bounds; one for
        `host` or `compute` that has to wait runs in the thread that finishes what it waits for.

        Args:
            fn: Called without arguments. On a `WorkLane` it returns a Future.
            reads: Variables read; may overlap with `writes`, which then counts.
            writes: Variables written.
            lane: Where it runs: `kind` or `kind:index`.
            name: Span name; default the function's name.
            priority: Higher runs first among the ready tasks of a lane of threads.
            num_bytes: Memory that it holds until it is done, for `max_bytes`.

        Raises:
            EngineError: the engine is closed or of another process, or an argument makes no sense: an
                unknown lane, what is no sequence of this engine's variables, a deleted one.
            RecursionError: the stack is used up; the engine continues.

        Cost: About 10 us. Blocks while the bounds are reached; on `compute` and `host`, until done.
        """
        scheduler = self._scheduler
        if not name:
            # `functools.partial` has none; others mean something else by it.
            name = getattr(fn, "__name__", "")
            if name.__class__ is not str or not name:
                name = type(fn).__name__
        elif name.__class__ is not str:
            check_name(name, "push")
        # Compared by type, without a call, since each push comes here; the rest is looked at closely.
        if not (type(num_bytes) is type(priority) is int and num_bytes >= 0 and callable(fn)):
            priority, num_bytes = check_push(fn, name, priority, num_bytes)
        try:
            record = scheduler.lanes.records[lane]
        except (KeyError, TypeError):  # a new lane, or nothing that could be a name
            record = scheduler.make_lane(lane, name)
        read = written = _NO_VARIABLES
        if writes is not _NO_VARIABLES:
            check_variables(writes, name, scheduler.owner)
            # A variable that is queued twice would have the task wait for itself.
            written = tuple(writes) if len(writes) < 2 else tuple(dict.fromkeys(writes))
        if reads is not _NO_VARIABLES:
            check_variables(reads, name, scheduler.owner)
            read = tuple([v for v in dict.fromkeys(reads) if v not in written]) if reads else ()
        task = EngineTask(fn, read, written, record, name, priority, num_bytes, 2)
        self._register(task)
        return task

    def wait(self, variable: Variable) -> None:
        """Block until every write of `variable` pushed so far is done.

        A write on a stream lane is over for the host once enqueued; the caller's current stream is then
        made to wait for it, on the device.

        Raises:
            EngineError: the variable is poisoned by a task that failed or was cancelled, chained to what that
                raised; every time, until `clear_error` or `delete`. Or the variable was deleted, is of
                another engine, or would come only after the task that waits; it says who waits.
        """
        scheduler = self._scheduler
        scheduler.process.check("wait")
        check_owner(variable, "wait", scheduler.owner)
        wait_for(scheduler, variable)
        event = variable.writer_event
        if event is not None:
            event[1].wait()
        error = variable.error
        if error is not None:
            with scheduler.lock:
                scheduler.failures.mark_told(error)
            failures.tell(error)

    def wait_all(self) -> None:
        """Block until nothing is pending.

        Raises:
            EngineError: a task failed and its error was not raised yet; or called by a task.
        """
        scheduler = self._scheduler
        scheduler.process.check("wait_all")
        check_outside(scheduler, "wait_all")
        scheduler.drain()
        # A stream's tasks are over for the host once enqueued; joining waits for the device.
        for record in list(scheduler.lanes.records.values()):
            if isinstance(record.runner, JoinableLane):
                record.runner.join()
        tell_untold(self._scheduler)

    def end_batch(self) -> None:
        """End a mini-batch: block until at most `max_batches` ended ones are unfinished.

        Called once per batch, it keeps a loop that pushes from running far ahead of the work.

        Raises:
            EngineError: a task failed and its error was not raised yet.
        """
        scheduler = self._scheduler
        scheduler.process.check("end_batch")
        pacing = scheduler.pacing
        check_unlocked(scheduler, "end_batch")
        with scheduler.lock:
            pacing.end_batch(scheduler.num_pushed)
        if scheduler.is_inside():
            return
        while True:
            with scheduler.lock:
                gate = pacing.batch_gate()
            if gate is None:
                break
            check_can_sleep(scheduler, "end_batch")
            with blocked_by(scheduler, "end_batch", all_of_them=False):
                pacing.wait_at(gate)
        tell_untold(self._scheduler)

    def cancel(self, task: EngineTask) -> bool:
        """Keep a task from running if it has not begun; True if so.

        What it would have written is poisoned by `concurrent.futures.CancelledError`, in its turn: a
        result that never came must not be read. A task that writes nothing is just left out.

        Raises:
            EngineError: it is no task of this engine, or the engine is of another process.
        """
        scheduler = self._scheduler
        scheduler.process.check("cancel")
        if not isinstance(task, EngineTask) or not scheduler.lanes.owns(task.record):
            raise EngineError(
                f"wanted a task of this engine to cancel, got {task!r}; cancel it where it was pushed"
            )
        try:
            return _cancel(scheduler, task)
        except BaseException:
            start_new_thread(settle, (scheduler, None))
            raise

    def delete(self, variable: Variable) -> None:
        """Refuse the variable from now on; what was pushed before still runs.

        The deletion is a write like any other. An error in it is forgotten by then; `wait_all` reports
        it if it was not raised yet.

        Raises:
            EngineError: the variable is deleted already, or the engine is closed.
        """
        self._push_control(variable, "delete", functools.partial(_delete, variable))
        variable.is_deleted = True

    def clear_error(self, variable: Variable) -> None:
        """Make a poisoned variable usable for what is pushed from now on; a write like any other.

        Raises:
            EngineError: the variable was deleted, or the engine is closed.
        """
        self._push_control(variable, "clear_error", functools.partial(_clear_error, variable))

    def statistics(self) -> EngineStatistics:
        """What was done so far.

        Raises:
            EngineError: the engine is of another process.
        """
        scheduler = self._scheduler
        scheduler.process.check("statistics")
        pacing = scheduler.pacing
        with scheduler.lock:
            lost = scheduler.num_failed + scheduler.num_skipped + scheduler.num_cancelled
            return EngineStatistics(
                pushed=scheduler.num_pushed,
                done=scheduler.num_pushed - len(scheduler.unfinished) - lost,
                failed=scheduler.num_failed,
                skipped=scheduler.num_skipped,
                cancelled=scheduler.num_cancelled,
                most_pending=pacing.most_pending,
                most_bytes=pacing.most_bytes,
                blocked_s=pacing.blocked_s,
                busy_s={
                    r.name: r.busy_ns * 1e-9 for r in scheduler.lanes.records.values() if r.busy_ns
                },
            )

    def timeline(self, title: str = "engine") -> Timeline:
        """The tasks that ran, the last 100,000 of them, as spans from the making of the engine.

        Raises:
            EngineError: the engine is of another process.
        """
        self._scheduler.process.check("timeline")
        begin_ns = self._scheduler.begin_ns
        spans = tuple(
            Span(
                name=name,
                lane=record.kind,
                index=index,
                start_ns=start - begin_ns,
                end_ns=end - begin_ns,
            )
            for name, record, index, start, end in list(self._scheduler.spans)
        )
        end = max((span.end_ns for span in spans), default=0)
        return Timeline(origin="measured", title=title, workers=1, spans=spans, steps_ns=(end,))

    def drop_at_exit(self) -> None:
        """Have collectives that are pending when the interpreter ends dropped without an error.

        For an engine whose user was given no reason to close it, and sees by other means what was left.
        """
        self._scheduler.drops_at_exit = True

    def close(self) -> None:
        """Finish what is pending and end the lanes' threads; further pushes are refused.

        In a child process made by fork it does nothing, for the threads stayed behind.

        Raises:
            EngineError: a task failed and its error was not raised yet; or called by a task.
        """
        self._scheduler.shut()
        self._ending.detach()  # last: one that was interrupted here ends with the engine
        if not self._scheduler.process.is_forked:
            tell_untold(self._scheduler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close; an error that was not waited for is raised, unless another is already on its way."""
        if error is None:
            self.close()
        else:
            self._scheduler.shut()
            self._ending.detach()

    def _push_control(self, variable: Variable, name: str, action: Callable[[], object]) -> None:
        scheduler = self._scheduler
        check_owner(variable, name, scheduler.owner)
        task = EngineTask(action, (), (variable,), scheduler.lanes.control, name, 0, 0, 3)
        self._register(task)

    def _register(self, task: EngineTask) -> None:
        """Push a task; what an exception leaves half done is settled apart."""
        scheduler = self._scheduler
        try:
            scheduler.push(task)
        except EngineError:
            pushed()
            if task.sequence:  # not of this push: of a signal handler that came meanwhile
                start_new_thread(settle, (scheduler, task))
            raise
        except BaseException:
            start_new_thread(settle, (scheduler, task))
            pushed()
            raise


def _delete(variable: Variable) -> BaseException | None:
    variable.forget_events()
    return _clear_error(variable)


def _clear_error(variable: Variable) -> BaseException | None:
    """What poisoned it; dropped by the caller, who holds no lock any more."""
    error, variable.error = variable.error, None
    return error


@own
def _cancel(scheduler: Scheduler, task: EngineTask) -> bool:
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
