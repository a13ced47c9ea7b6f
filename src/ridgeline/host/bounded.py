"""`within`: a call into a library that may never return, given up after a while.

A store of torch waits for its server without end when the network between them is gone: the server keeps its
time-outs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from ridgeline import units

T = TypeVar("T")


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
    try:
        return done.result(limit_s)
    except FutureTimeoutError:
        if done.done():  # the time-out was the call's own, or the answer came at the very end
            return done.result()
    raise RuntimeError(f"no answer from {what} for {units.seconds(limit_s)}")
