"""What the present thread is doing for engines, and the gates at which threads sleep."""

import threading
from collections import deque

from ridgeline.engine.task import EngineTask


class Agenda(deque[EngineTask]):
    """Tasks that a thread will start once it has started the present one.

    Attributes:
        task: The task whose function ran when it was made, or None.
        outer: The agenda to which the thread comes back afterwards, or None.
    """

    def __init__(
        self, ready: list[EngineTask], task: EngineTask | None, outer: "Agenda | None"
    ) -> None:
        super().__init__(ready)
        self.task = task
        self.outer = outer


class Here(threading.local):
    """What the present thread is doing for engines.

    Attributes:
        task: The task whose function runs, or None.
        agenda: The innermost one, or None.
    """

    task: EngineTask | None = None
    agenda: Agenda | None = None


here = Here()


def closed_gate() -> threading.Lock:
    """A lock that is held: acquiring it sleeps until another thread releases it."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def open_gates(gates: list[threading.Lock]) -> None:
    """Wake those who sleep at these gates, which are forgotten; again after an interrupt, if need be."""
    for gate in gates:
        # It may be open already, where an interrupt came in between and this runs again.
        if gate.locked():
            gate.release()
    gates.clear()


def nothing() -> None:
    """What is left of a function that ran."""
