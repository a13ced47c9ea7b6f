"""What `Feed` and `ToHost` have in common: nests, one after the other, and something to close."""

import abc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

from ridgeline.closing import Closing
from ridgeline.errors import PlanError
from ridgeline.feeding.slots import Slot

MOST_AHEAD = 1 << 16
"""Places in the ring are made before there is anything in them."""


class Stream(Closing, Iterator[Any]):
    """Nests in order, and a context manager.

    Several threads may ask in turn: each nest goes to one of them.
    """

    def __init__(self) -> None:
        self._turn = threading.RLock()
        _streams.add(self)

    def __next__(self) -> Any:
        """The next nest; raises StopIteration where there is none, and whatever the source raised."""
        self._check_asker()
        with self._turn:
            return self._next()

    @abc.abstractmethod
    def _next(self) -> Any:
        """The next nest; called by one thread at a time."""

    def _check_asker(self) -> None:
        """Refuse who must not ask for the next nest; called by any thread."""

    def after_fork(self) -> None:
        """Go on in a child, where the thread that had its turn may not be."""
        self._turn = threading.RLock()

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
            # Compared by identity: an error may be of a class whose objects count as false.
            if error is None or isinstance(error, StopIteration):
                raise StopIteration
            raise error
        finally:
            del error  # its traceback holds this frame: no cycle, or what it refers to would linger


def check_depth(depth: object, least: int, where: str, why: str = "") -> None:
    """Raise a PlanError for what is no number of nests that can be made ahead."""
    if not isinstance(depth, int) or depth < least:
        raise PlanError(f"wanted a whole depth >= {least}{why}, got {depth!r} in {where}")
    if depth > MOST_AHEAD:
        raise PlanError(f"wanted a depth of at most {MOST_AHEAD}, got {depth} in {where}")


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


def _tell_the_child() -> None:
    for stream in _streams:
        stream.after_fork()


os.register_at_fork(after_in_child=_tell_the_child)
