"""Variables in use: which are refused, and what streams still have to do with them."""

from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline.engine.task import EngineTask, Variable
from ridgeline.errors import EngineError


def check_variables(given: Sequence[Variable], where: str, owner: object) -> None:
    """Raise an EngineError for what is no sequence of variables of this engine."""
    # Classes are compared first, since `isinstance` with an abstract class costs more than the rest.
    if given.__class__ in (tuple, list) or isinstance(given, Sequence):
        for variable in given:
            if variable.__class__ is not Variable:
                break
            if variable.owner is not owner:
                check_owner(variable, where, owner)
        else:
            return
    raise EngineError(
        f"wanted a tuple or list of variables, got {given!r} as reads or writes of {where!r}; make them with "
        "engine.variable() and pass (variable,)"
    )


def check_owner(variable: Variable, where: str, owner: object) -> None:
    """Raise an EngineError for what is no variable of this engine: it does not know another one's tasks."""
    if variable.__class__ is not Variable:
        raise EngineError(
            f"wanted a variable for {where!r}, got {variable!r}; make one with engine.variable()"
        )
    if variable.owner is not owner:
        raise EngineError(
            f"wanted a variable of this engine for {where!r}, got {variable.name!r} of another one; "
            "make it with variable() of the engine that uses it"
        )


def check_alive(variable: Variable, where: str) -> None:
    """Raise an EngineError for a deleted variable."""
    if variable.is_deleted:
        raise EngineError(
            f"wanted a variable in use for {where!r}, got {variable.name!r}, which was deleted; "
            "make a new one with engine.variable()"
        )


def check_all_alive(task: EngineTask) -> None:
    """Raise an EngineError for a task that touches a deleted variable."""
    for variable in task.reads:
        if variable.is_deleted:
            check_alive(variable, task.name)
    for variable in task.writes:
        if variable.is_deleted:
            check_alive(variable, task.name)


def touches_streams(task: EngineTask) -> bool:
    """Some stream may still use the task's variables."""
    for variable in task.reads:
        if variable.writer_event is not None:
            return True
    for variable in task.writes:
        if variable.writer_event is not None:
            return True
        if variable.reader_events:
            return True
    return False


def events_before(task: EngineTask) -> Iterator[Any]:
    """The events that must have come before the task may run on the host."""
    for variable in (*task.reads, *task.writes):
        if variable.writer_event is not None:
            yield variable.writer_event[1]
    for variable in task.writes:
        for event, _ in variable.reader_events.values():
            yield event
