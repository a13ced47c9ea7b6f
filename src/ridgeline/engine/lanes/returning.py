"""Callbacks that threads of torch are on their way back from, for which the end of the interpreter waits.

A collective of gloo ends in a thread of torch's, which calls Python and then gives the callback up. An
interpreter that ends meanwhile ends that thread where it asks for Python next, inside of C++, and so the
process with SIGABRT ("terminate called without an active exception"), although all its work was done.
"""

import atexit
import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

LIMIT_S = 10.0
"""So long the end of the interpreter waits: a thread takes microseconds, on a crowded host as long as it is
kept from a core."""
_POLL_S = 0.001

_returning: "weakref.WeakSet[Returning]" = weakref.WeakSet()


class Returning:
    """A callback for one call by a thread of torch's; known from that call until torch gives it up.

    Cost: About 1 us.
    """

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call
        _wait_at_exit()

    def __call__(self, future: Any) -> None:
        """Pass it on."""
        _returning.add(self)
        call = self._call
        # The traceback of a lost peer holds this frame, and would seem to be on its way for ever.
        del self
        call(future)


def _wait() -> None:
    end = time.monotonic() + LIMIT_S
    while _returning and time.monotonic() < end:
        time.sleep(_POLL_S)


@functools.cache
def _wait_at_exit() -> None:
    atexit.register(_wait)
