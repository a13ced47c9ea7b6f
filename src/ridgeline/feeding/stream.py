"""What `Feed` and `ToHost` have in common: nests, one after the other, and something to close."""

import abc
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from ridgeline.closing import Closing
from ridgeline.feeding.slots import Slot


class Stream(Closing, Iterator[Any]):
    """Nests in order, and a context manager.

    Several threads may ask in turn: each nest goes to one of them.
    """

    def __init__(self) -> None:
        self._turn = threading.RLock()

    def __next__(self) -> Any:
        """The next nest.

        Raises:
            StopIteration: there is none.
            Exception: whatever the source raised.
        """
        with self._turn:
            return self._next()

    @abc.abstractmethod
    def _next(self) -> Any:
        """The next nest; called by one thread at a time."""

    @abc.abstractmethod
    def close(self) -> None:
        """End it; what was handed out stays valid. Safe to call twice."""

    def _end(self) -> None:
        """What the end of the iteration does."""
        self.close()

    def _stop(self, slot: Slot) -> NoReturn:
        """End it, and raise what the slot holds instead of a nest: an error, or the end."""
        error, slot.error = slot.error, None
        self._end()
        try:
            if isinstance(error, StopIteration):
                raise StopIteration
            raise error or StopIteration
        finally:
            del error  # its traceback holds this frame: no cycle, or what it refers to would linger
