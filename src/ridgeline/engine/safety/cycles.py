"""Tasks that wait for each other: found when the last of them begins to wait.

Only a task that waits can close a circle, since pushes wait for earlier ones alone. Every task asks before it
waits, so it is enough to ask whether this one can ever continue, as things stand.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ridgeline.engine.lanes.threads import ThreadLane
from ridgeline.engine.task import Agenda, EngineTask, LaneRecord, Variable
from ridgeline.errors import EngineError


class Need(NamedTuple):
    """What a task needs to get to its end: that all of `others` end, or one of them."""

    others: list[EngineTask]
    all_of_them: bool
    why: str


class Blocked(NamedTuple):
    """What a running task waits for.

    `need` is as things stand when it is asked; no other thread starts the tasks of the agenda, the innermost.
    """

    need: Callable[[], Need]
    agenda: Agenda | None


def version_of(variable: Variable) -> Callable[[], Need]:
    """The need of who waits for a variable, from now on: what was pushed so far that writes it."""
    last = variable.pushed_writes
    why = f"variable {variable.name!r}, written by"
    return lambda: Need(variable.unfinished_writes(last), True, why)


def check_ends(
    task: EngineTask,
    variable: Variable,
    unfinished: Iterable[EngineTask],
    blocked: Mapping[EngineTask, Blocked],
) -> None:
    """Raise an EngineError if a task waits for a variable, as `blocked` says already, and that cannot end."""
    if variable in task.writes:
        raise EngineError(
            f"wanted a wait for what others write, got {variable.name!r}, which the "
            f"waiting task {task.name!r} itself writes; wait after the push instead"
        )
    cycle = find_cycle(task, unfinished, blocked)
    if cycle:
        raise EngineError(
            f"wanted a wait that can end, got {variable.name!r} in task {task.name!r}, which would wait for "
            f"itself: {'; '.join(cycle)}; push a task that reads {variable.name!r} instead of waiting, "
            "or give the lane more threads"
        )


def find_cycle(
    root: EngineTask, unfinished: Iterable[EngineTask], blocked: Mapping[EngineTask, Blocked]
) -> list[str]:
    """Who waits for whom, from `root` until one comes again; empty if `root` can continue.

    A task whose function runs and does not wait is taken to end some time.

    Cost: A few passes over the unfinished tasks and their variables; asked only by tasks that wait.
    """
    known = _Known(unfinished, blocked)
    needs: dict[EngineTask, list[Need]] = {}
    reached = [root]
    while reached:
        task = reached.pop()
        if task not in needs:
            needs[task] = list(known.needs(task))
            reached.extend(other for need in needs[task] for other in need.others)
    stuck = dict.fromkeys(sorted(needs, key=lambda task: task.sequence))  # until shown otherwise
    num_before = 0
    while len(stuck) != num_before:
        num_before = len(stuck)
        for task in list(stuck):  # what others wait for comes first, as a rule
            if all(_is_met(need, stuck) for need in needs[task]):
                del stuck[task]
    if root not in stuck:
        return []
    cycle: list[str] = []
    seen: set[EngineTask] = set()
    task = root
    while task not in seen:
        seen.add(task)
        need = next(need for need in needs[task] if not _is_met(need, stuck))
        other = next(other for other in need.others if other in stuck)
        cycle.append(f"{task.name!r} on lane {task.lane} waits for {need.why} {other.name!r}")
        task = other
    return cycle


def _is_met(need: Need, stuck: Mapping[EngineTask, None]) -> bool:
    if need.all_of_them:
        return not any(other in stuck for other in need.others)
    return not need.others or any(other not in stuck for other in need.others)


class _Known:
    """What tasks need, looked up once for all of them."""

    def __init__(
        self, unfinished: Iterable[EngineTask], blocked: Mapping[EngineTask, Blocked]
    ) -> None:
        self._blocked = blocked
        self._running: dict[LaneRecord, list[EngineTask]] = defaultdict(list)
        self._before_in_lane: dict[EngineTask, EngineTask] = {}
        self._readers: dict[Variable, list[EngineTask]] = defaultdict(list)
        self._before: dict[Variable, dict[EngineTask, list[EngineTask]]] = {}
        self._inside: dict[EngineTask, list[EngineTask]] = defaultdict(list)
        self._starters: dict[EngineTask, list[EngineTask]] = defaultdict(list)
        last: dict[LaneRecord, EngineTask] = {}
        for task in unfinished:
            if task.is_taken:
                self._running[task.record].append(task)
            if task.record in last:
                self._before_in_lane[task] = last[task.record]
            last[task.record] = task
            for variable in task.reads:
                self._readers[variable].append(task)
        for task, wait in blocked.items():
            # What runs inside of a task's function holds that task up, however many tasks lie between.
            outer, agenda = task.outer, wait.agenda
            while outer is not None:
                self._inside[outer].append(task)
                outer = outer.outer
            while agenda is not None:
                for later in list(agenda):
                    self._starters[later].append(task)
                agenda = agenda.outer

    def needs(self, task: EngineTask) -> Iterable[Need]:
        """What has to happen before the task ends."""
        wait = self._blocked.get(task)
        if wait is not None:
            yield wait.need()
        if task.is_taken:
            yield Need(self._inside[task], True, "the end of its function, in which there runs")
            return
        if task.waits:
            for variable in (*task.reads, *task.writes):
                before = self._before_in_queue(variable).get(task, [])
                yield Need(before, True, f"variable {variable.name!r}, used by")
        runner = task.record.runner
        if isinstance(runner, ThreadLane):
            running = self._running[task.record]
            if len(running) >= runner.num_threads:
                yield Need(running, False, "its lane, where there runs")
        elif task.record.keeps_order:
            if task in self._before_in_lane:
                earlier = [self._before_in_lane[task]]
                yield Need(earlier, True, "its lane, which keeps the order of pushes, and")
        elif not task.waits:
            yield Need(self._starters[task], True, "its thread, where there runs")

    def _before_in_queue(self, variable: Variable) -> dict[EngineTask, list[EngineTask]]:
        """By task that waits for the variable: those right before it, which have to be through with it."""
        before = self._before.get(variable)
        if before is None:
            before = self._before[variable] = dict[EngineTask, list[EngineTask]]()
            queued = {task for task, _ in variable.queue}
            writer: list[EngineTask] = [] if variable.writer is None else [variable.writer]
            readers = [task for task in self._readers[variable] if task not in queued]
            for task, is_write in variable.queue:
                before[task] = (readers or writer) if is_write else writer
                if is_write:
                    writer = [task]
                    readers = list[EngineTask]()
                else:
                    readers.append(task)
        return before
