"""Tasks that wait for each other: found when the last of them begins to wait.

Only a task that waits can close a circle, since pushes wait for earlier ones alone. Every task asks before it
waits, so it is enough to ask whether this one can ever go on, as things stand.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ridgeline.errors import EngineError
from ridgeline.runtime.engine.task import Agenda, Task
from ridgeline.runtime.engine.threads import ThreadLane
from ridgeline.runtime.engine.variable import Variable


class Blocked(NamedTuple):
    """What a running task waits for: a version of a variable.

    Attributes:
        agenda: The innermost one of its thread, whose tasks nobody else will start.
    """

    variable: Variable
    version: int
    agenda: Agenda | None


class Need(NamedTuple):
    """What a task needs to get to its end: that all of `others` end, or one of them."""

    others: list[Task]
    all_of_them: bool
    why: str


def check_ends(
    task: Task, variable: Variable, unfinished: Iterable[Task], blocked: Mapping[Task, Blocked]
) -> None:
    """Refuse that a task waits for a variable, as `blocked` says already, if that cannot end.

    Raises:
        EngineError: it cannot.
    """
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
    root: Task, unfinished: Iterable[Task], blocked: Mapping[Task, Blocked]
) -> list[str]:
    """Who waits for whom, from `root` until one comes again; empty if `root` can go on.

    A task whose function runs and does not wait is taken to end some time.

    Cost: A few passes over the unfinished tasks that `root` depends on; asked only by tasks that wait.
    """
    tasks = list(unfinished)
    needs: dict[Task, list[Need]] = {}
    reached = [root]
    while reached:
        task = reached.pop()
        if task not in needs:
            needs[task] = list(_needs(task, tasks, blocked))
            reached.extend(other for need in needs[task] for other in need.others)
    stuck = dict.fromkeys(needs)  # until shown otherwise
    found = True
    while found:
        found = False
        for task in sorted(stuck, key=_sequence):  # what others wait for comes first, as a rule
            if all(_is_met(need, stuck) for need in needs[task]):
                del stuck[task]
                found = True
    if root not in stuck:
        return []
    cycle: list[str] = []
    seen: set[Task] = set()
    task = root
    while task not in seen:
        seen.add(task)
        need = next(need for need in needs[task] if not _is_met(need, stuck))
        other = next(other for other in need.others if other in stuck)
        cycle.append(f"{task.name!r} on lane {task.lane} waits for {need.why} {other.name!r}")
        task = other
    return cycle


def _is_met(need: Need, stuck: Mapping[Task, None]) -> bool:
    if need.all_of_them:
        return not any(other in stuck for other in need.others)
    return not need.others or any(other not in stuck for other in need.others)


def _needs(task: Task, tasks: list[Task], blocked: Mapping[Task, Blocked]) -> Iterable[Need]:
    """What has to happen before the task ends."""
    waiting = blocked.get(task)
    if waiting is not None:
        others = waiting.variable.unfinished_writes(waiting.version)
        yield Need(others, True, f"variable {waiting.variable.name!r}, written by")
    if task.is_taken:
        inside = [other for other in blocked if task in _around(other)]
        yield Need(inside, True, "the end of its function, in which there runs")
        return
    if task.waits:
        for variable in (*task.reads, *task.writes):
            before = _before(task, variable, tasks)
            yield Need(before, True, f"variable {variable.name!r}, used by")
    runner = task.record.runner
    if isinstance(runner, ThreadLane):
        running = [other for other in tasks if other.is_taken and other.record is task.record]
        if len(running) >= runner.num_threads:
            yield Need(running, False, "its lane, where there runs")
    elif task.record.keeps_order:
        earlier = [o for o in tasks if o.record is task.record and o.sequence < task.sequence]
        yield Need(earlier[-1:], True, "its lane, which keeps the order of pushes, and")
    elif not task.waits:
        owners = [other for other, wait in blocked.items() if _is_left(task, wait.agenda)]
        yield Need(owners, True, "its thread, where there runs")


def _around(task: Task) -> Iterable[Task]:
    """The tasks in whose functions this one runs."""
    outer = task.outer
    while outer is not None:
        yield outer
        outer = outer.outer


def _is_left(task: Task, agenda: Agenda | None) -> bool:
    """The task comes after what the thread of this agenda does."""
    while agenda is not None:
        if task in agenda:
            return True
        agenda = agenda.outer
    return False


def _before(task: Task, variable: Variable, tasks: list[Task]) -> list[Task]:
    """The unfinished tasks that must be through with the variable first; none if it holds the variable."""
    before = [] if variable.writer is None else [variable.writer]
    for queued, _ in variable.queue:
        if queued is task:
            break
        before.append(queued)
    else:
        return []
    if variable.readers:  # they are only counted
        inside = {queued for queued, _ in variable.queue}
        before += [other for other in tasks if variable in other.reads and other not in inside]
    return before


def _sequence(task: Task) -> int:
    return task.sequence
