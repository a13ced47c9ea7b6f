"""What failed: told to somebody once at least, with where the task came from."""

from concurrent.futures import CancelledError

from ridgeline.errors import EngineError
from ridgeline.runtime.engine.task import Task


class Failures:
    """The errors of an engine's tasks, and which of them nobody has been told of yet.

    Every method but `tell` is called under the engine's lock.
    """

    def __init__(self) -> None:
        self._untold: list[BaseException] = []

    def add(self, task: Task, error: BaseException) -> None:
        """A task raised: note where it was pushed, and that somebody has to be told."""
        error.add_note(_place(task))
        error.add_note(f"pushed by (most recent call last):\n{task.push_lines()}")
        self._untold.append(error)

    def mark_told(self, error: BaseException) -> None:
        """Somebody waited for a variable that it poisons."""
        self._untold = [other for other in self._untold if other is not error]

    def take_untold(self) -> list[BaseException]:
        """Everything nobody has been told of; it counts as told from now on."""
        untold = list(self._untold)
        self._untold.clear()
        return untold


def cancellation(task: Task) -> CancelledError:
    """What poisons the variables that a cancelled task would have written."""
    error = CancelledError("cancelled before it began")
    error.add_note(_place(task))
    return error


def tell(error: BaseException, others: int = 0) -> None:
    """Raise what a task raised, as the engine's error.

    Args:
        error: What a task raised.
        others: Further errors that are not raised, for the message.

    Raises:
        EngineError: always; chained to `error`, whose traceback is that of the task.
    """
    place = (getattr(error, "__notes__", None) or ["in a task"])[0]
    more = f"; {others} other task{'s' * (others > 1)} failed as well" if others else ""
    raise EngineError(f"{type(error).__name__}: {error} ({place}){more}") from error


def _place(task: Task) -> str:
    return f"in task {task.name!r} on lane {task.lane}, pushed at {task.origin}"
