"""`within`: a call into a library that may never return, given up after a while.

A store of torch waits for its server without end when the network between them is gone: the server keeps its
time-outs.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from ridgeline import units

T = TypeVar("T")
SLICES = 10


class Wait:
    """So many seconds of waiting, of which the time between two looks takes a slice at most.

    A clock goes on while a host or this process stands still, and others have been given no time to answer.
    """

    def __init__(self, limit_s: float) -> None:
        self.slice_s, self._left_s = limit_s / SLICES, limit_s
        self._look_s = time.monotonic()

    def is_over(self) -> bool:
        """A look, after less than `slice_s`, or whatever time that took."""
        look_s = time.monotonic()
        self._left_s -= min(look_s - self._look_s, self.slice_s)
        self._look_s = look_s
        return self._left_s <= 0


def within(limit_s: float, call: Callable[[], T], what: str) -> T:
    """The result of a call that gets so many seconds.

    The call runs in a thread of its own, which is kept until the process ends where it does not return.
    `what` names who is called, for the message.

    Raises:
        RuntimeError: it has not returned by then.
        Exception: what the call raises.

    Cost: Starts a thread.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            done.set_exception(error)

    # No executor of `concurrent.futures`: it joins its threads at exit, and one that hangs would hold up the
    # process.
    threading.Thread(target=run, name="ridgeline-within", daemon=True).start()
    wait = Wait(limit_s)
    while not wait.is_over():
        try:
            return done.result(wait.slice_s)
        except FutureTimeoutError:
            if done.done():  # the time-out was the call's own, or the answer came at the very end
                return done.result()
    raise RuntimeError(f"no answer from {what} for {units.seconds(limit_s)}")
