"""What failed: raised at least once, with where the task came from."""

from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

from ridgeline import units
from ridgeline.engine.task import EngineTask
from ridgeline.errors import EngineError

KEPT = 16
"""Failures that were not raised yet and are kept. A traceback keeps the variables of all its frames, so that
a loop whose tasks all fail would fill the memory; of further ones only the number is kept."""

_MARK = "_ridgeline_is_only_counted"
"""Attribute of an error that is not kept; exceptions of Python itself take no weak references."""
_PLACE = "in task "
"""How the note begins that says which task failed; an error may bring notes of its own."""


class Failures:
    """The errors of an engine's tasks, and which of them were not raised yet.

    Every method is called under the engine's lock. So none of them raises, whatever the class of an error
    does when it is asked for its notes, given one, or shown.
    """

    def __init__(self) -> None:
        self._untold: list[BaseException] = []
        self._num_counted = 0

    def add(self, task: EngineTask, error: BaseException) -> None:
        """A task raised: note where it was pushed, and that it has to be raised."""
        place = _place(task)
        if place not in _notes(error):  # one exception may be raised many times
            with suppress(Exception):
                error.add_note(place)
                error.add_note(f"pushed by (most recent call last):\n{task.push_lines()}")
        if len(self._untold) < KEPT:
            self._untold.append(error)
        else:
            self._num_counted += 1
            with suppress(Exception):
                setattr(error, _MARK, _num_counted_of(error) + 1)

    def mark_told(self, error: BaseException) -> None:
        """A variable that it poisons was waited for."""
        self._untold = [other for other in self._untold if other is not error]
        # No more than are counted: it may be of another engine, or of before everything was raised.
        self._num_counted -= min(self._num_counted, _num_counted_of(error))
        with suppress(Exception):
            setattr(error, _MARK, 0)

    def take_untold(self) -> tuple[list[BaseException], int]:
        """Those kept that were not raised yet, and how many more there were; all count as raised now."""
        untold, num_counted = self._untold, self._num_counted
        self._untold = []
        self._num_counted = 0
        return untold, num_counted


def cancellation(task: EngineTask) -> CancelledError:
    """What poisons the variables that a cancelled task would have written."""
    error = CancelledError("cancelled before it began")
    error.add_note(_place(task))
    return error


def tell(error: BaseException, others: int = 0, only_counted: int = 0) -> None:
    """Raise what a task raised, as the engine's error.

    The message names `others` further errors that are not raised, of which `only_counted` were not kept.

    Raises:
        EngineError: always; chained to `error`, whose traceback is that of the task.
    """
    place = next((note for note in _notes(error) if note.startswith(_PLACE)), "in a task")
    more = f"; {units.counted(others, 'other task')} failed as well" if others else ""
    if only_counted:
        more += f", of which {only_counted} were only counted; wait for variables, or more often, to see all"
    raise EngineError(f"{type(error).__name__}: {_shown(error)} ({place}){more}") from error


def _place(task: EngineTask) -> str:
    return f"{_PLACE}{task.name!r} on lane {task.lane}, pushed at {task.origin}"


def _notes(error: BaseException) -> list[str]:
    """The notes of an error, where they are what Python makes of them."""
    try:
        notes: Any = getattr(error, "__notes__", [])
    except Exception:  # noqa: BLE001 - a class of the user's; its error is told without notes
        return []
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []


def _num_counted_of(error: BaseException) -> int:
    try:
        number: Any = getattr(error, _MARK, 0)
    except Exception:  # noqa: BLE001 - likewise
        return 0
    return number if isinstance(number, int) else 0


def _shown(error: BaseException) -> str:
    """Its text; of a class that cannot show itself, that it cannot."""
    try:
        return str(error)
    except Exception as raised:  # noqa: BLE001 - likewise
        return f"its text cannot be shown, as that raises {type(raised).__name__}"
