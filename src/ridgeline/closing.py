"""What holds something until it is closed, and may be used in a `with` block."""

import abc
from typing import Self

from ridgeline.errors import RidgelineError, first_line


class Closing(abc.ABC):
    """A context manager whose end is its `close`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what is held. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Close; what closing fails with because of an error that is on its way is a note of that error."""
        if error is None:
            self.close()
            return
        try:
            self.close()
        except RidgelineError as later:
            error.add_note(f"closing it ended in {type(later).__name__}: {first_line(later, '')}")
