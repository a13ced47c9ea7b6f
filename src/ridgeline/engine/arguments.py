"""What the engine refuses by name, before anything is changed."""

import inspect
import operator
from collections.abc import Mapping
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

from ridgeline.errors import EngineError


def whole_number(name: str, value: Any, where: str, *, least: int | None = None) -> int:
    """The value as an int, else an EngineError; numpy's integers are taken, booleans and floats are not."""
    bound = "" if least is None else f" >= {least}"
    wanted = f"wanted {name}{bound}" if least is not None else f"wanted a whole number as {name}"
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise EngineError(f"{wanted}, got {value!r} in {where}; give a whole number")
    if least is not None and number < least:
        raise EngineError(f"{wanted}, got {value} in {where}; raise it")
    return number


def check_name(name: Any, where: str) -> None:
    """Raise an EngineError for a name that is no text."""
    if not isinstance(name, str):
        raise EngineError(f"wanted a name of type str, got {name!r} in {where}(...); give text")


def check_factories(threads: Any, lanes: Any) -> None:
    """Raise an EngineError for what is no mapping, and for a lane's factory that cannot be called."""
    for what, given in (("threads", threads), ("lanes", lanes)):
        if not isinstance(given, Mapping):
            raise EngineError(f"wanted {what} by lane, got {given!r} in Engine(...); give a dict")
    for name, make in lanes.items():
        if not callable(make):
            raise EngineError(
                f"wanted a factory for lane {name!r}, got {make!r} in Engine(lanes=...); give a callable"
            )


UNBEGUN = (CoroutineType, GeneratorType, AsyncGeneratorType)
"""What a function returns that has not run: its body waits for somebody who iterates or awaits it."""
_LANE = ("runs_inline", "enqueue", "forget", "start", "close")


def check_lane(runner: Any, name: str) -> None:
    """Raise an EngineError for what a factory made that lacks something of a lane."""
    lacking = [what for what in _LANE if not hasattr(runner, what)]
    if lacking:
        raise EngineError(
            f"wanted a lane from the factory of {name!r}, got {runner!r} without {', '.join(lacking)} in "
            "Engine(lanes=...); return a LaneRunner"
        )


def check_ran(value: Any, name: str) -> None:
    """Raise an EngineError for what a task's function returned, of `UNBEGUN`, if nothing of it has run."""
    if isinstance(value, CoroutineType):
        is_unbegun = inspect.getcoroutinestate(value) == inspect.CORO_CREATED
        value.close()  # Python would warn that nobody awaits it
    else:
        is_unbegun = (
            not isinstance(value, GeneratorType)
            or inspect.getgeneratorstate(value) == inspect.GEN_CREATED
        )
    if is_unbegun:
        raise EngineError(
            f"wanted a function that does its work when it is called, got one that returned a "
            f"{type(value).__name__} of which nothing has run, in task {name!r}; push what iterates it, or "
            "asyncio.run of it"
        )


def check_push(fn: Any, name: Any, priority: Any, num_bytes: Any) -> tuple[int, int]:
    """Priority and bytes as ints; an EngineError for what no task can be made of."""
    if not callable(fn):
        raise EngineError(
            f"wanted a function to run, got {fn!r} in push(...); give a callable without arguments"
        )
    where = f"push of {name!r}"
    return (
        whole_number("priority", priority, where),
        whole_number("num_bytes", num_bytes, where, least=0),
    )
