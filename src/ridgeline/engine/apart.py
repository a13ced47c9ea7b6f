"""What must not be interrupted is done apart: in a thread that no signal and no used-up stack reaches.

Python raises KeyboardInterrupt in the main thread after any call, and RecursionError where the stack ends.
Code that repairs what such an exception left half done would meet the next one. So a handler only notes what
there is to repair, which takes no call, or begins with `start_new_thread`: it is C, and the thread has
started before anything can come in between. Lanes start their threads apart as well: an interrupt in
`Thread.start` leaves a thread that is listed but never started, or one that waits for a lock for good.
"""

from _thread import start_new_thread
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


def apart(action: Callable[..., None], *arguments: Any) -> None:
    """Do it in a thread of its own and wait; raises what it raises. An interrupt ends the waiting alone.

    Cost: About 50 us.
    """
    outcome: SimpleQueue[BaseException | None] = SimpleQueue()
    try:
        start_new_thread(_do, (outcome, action, *arguments))
    except RuntimeError:  # there are too many, or the interpreter ends
        _do(outcome, action, *arguments)
    # An interrupt may end this wait; the action continues in its thread.
    error = outcome.get()
    if error is not None:
        raise error


def _do(
    outcome: "SimpleQueue[BaseException | None]", action: Callable[..., None], *arguments: Any
) -> None:
    try:
        action(*arguments)
    except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
        outcome.put(error)
    else:
        outcome.put(None)
