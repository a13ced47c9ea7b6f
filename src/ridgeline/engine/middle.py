"""Calls that come in the middle of the engine's own work: of a signal handler, a finalizer, or a profiler.

Python calls these between any two steps of a thread, also while it registers a push, holds the engine's
lock, or has tasks to start that no other thread will. What they push is taken. What they wait for could be
the very thing that their thread is about to do, so it is refused.
"""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

from ridgeline.engine.process import Process
from ridgeline.engine.task import EngineTask, here
from ridgeline.errors import EngineError

F = TypeVar("F", bound=Callable[..., Any])
_own: set[CodeType] = set()
_tasks: set[CodeType] = set()
_late: set[CodeType] = set()


class SchedulerView(Protocol):
    """What is asked of a scheduler in whose work a call may come."""

    process: Process
    unfinished: dict[int, EngineTask]

    def owns_lock(self) -> bool:
        """Whether the present thread holds the engine's lock."""
        ...

    def is_inside(self) -> bool:
        """Whether the caller is a task of this engine."""
        ...

    def register(self, task: EngineTask) -> int:
        """Queue a task; how many of its variables it waits for."""
        ...

    def start(self, task: EngineTask, waits: int) -> None:
        """Start a task that was registered, if that is its pusher's."""
        ...


def own(function: F) -> F:
    """Mark a method of the scheduler, or of what has its `process`, that may leave tasks to its thread."""
    _own.add(function.__code__)
    return function


def makes_late_pushes(function: F) -> F:
    """Mark what makes pushes that came too early."""
    _late.add(function.__code__)
    return own(function)


def runs_tasks(function: F) -> F:
    """Mark what calls a task's function, which may wait."""
    _tasks.add(function.__code__)
    return function


def is_in_the_middle(scheduler: SchedulerView, begin: FrameType | None) -> bool:
    """Whether a thread is inside of an engine's own work, and not of a task that this runs.

    Cost: About 50 ns for each frame; asked only by who is about to sleep.
    """
    frame = begin
    while frame is not None:
        code = frame.f_code
        # Right before the function and right behind it, the task is not the present one.
        if code in _tasks and frame.f_locals["task"] is here.task:
            return False
        if code in _own and _process_of(frame) is scheduler.process:
            return True
        frame = frame.f_back
    return False


def is_pushed_in_the_middle(scheduler: SchedulerView, push: CodeType) -> bool:
    """Whether the present push is that of a signal handler or finalizer, whose thread has to go on.

    `push` is the code of the push, which is inside of the engine by itself.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way to know who calls
    while frame is not None and frame.f_code is not push:
        if frame.f_code in _late:
            return True
        frame = frame.f_back
    return frame is not None and is_in_the_middle(scheduler, frame.f_back)


def check_unlocked(scheduler: SchedulerView, what: str) -> None:
    """Raise an EngineError where this very thread changes the engine's state, which the call would, too."""
    if scheduler.owns_lock():
        raise _refusal(what)


def check_can_sleep(scheduler: SchedulerView, what: str) -> None:
    """Raise an EngineError where this very thread may have left to do what it would sleep for."""
    if is_in_the_middle(scheduler, sys._getframe(1)):  # noqa: SLF001 - the caller
        raise _refusal(what)


def check_outside(scheduler: SchedulerView, what: str) -> None:
    """Raise an EngineError in a task, which would wait for itself, and amid the engine's own work."""
    if scheduler.is_inside():
        task = here.task
        raise EngineError(
            f"wanted {what}() outside of the engine's tasks, got it in {task and task.name!r}, which "
            "it would wait for; push a task that reads what is awaited, or wait for its variables"
        )
    check_unlocked(scheduler, what)
    if scheduler.unfinished:
        check_can_sleep(scheduler, what)


def _refusal(what: str) -> EngineError:
    return EngineError(
        f"wanted {what}() outside of the engine's own work, got it in a signal handler or finalizer that "
        "Python called while this thread pushes a task or ends one, which would be waited for; push a task "
        "that reads what is awaited"
    )


def _process_of(frame: FrameType) -> object:
    names = frame.f_locals
    return getattr(names.get("self", names.get("scheduler")), "process", None)
