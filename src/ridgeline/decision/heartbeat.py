"""Lines of progress, and signs of life: what is still under way, where nothing else was said for a while."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

from ridgeline import units

Say = Callable[[str], None]
EVERY_S = 10.0
"""Seconds without a message after which one is due."""


def to_stderr(line: str) -> None:
    """Report a line of progress."""
    sys.stderr.write(f"ridgeline: {line}\n")
    sys.stderr.flush()


class _Work(NamedTuple):
    """What is under way, since when, and about how long it takes; 0 where that is unknown."""

    what: str
    begin_s: float
    expected_s: float


class Heartbeat:
    """Says every ten seconds what is under way, from a thread of its own while it is a context.

    `say` takes the lines, in that thread; None says nothing, and there is no thread.

    Example:
        >>> with Heartbeat(print) as heartbeat, heartbeat.during("compiling", 38.0):  # doctest: +SKIP
        ...     compile()
          still compiling (10.0 s so far, about 38.0 s expected)
    """

    def __init__(self, say: Say | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._spoken_s = clock()
        self._work: _Work | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def during(self, what: str, expected_s: float = 0.0) -> Iterator[None]:
        """What happens inside is reported as `what`, and afterwards what was reported before."""
        # Nested: what goes on outside continues when the inside is done.
        before, self._work = self._work, _Work(what, self._clock(), expected_s)
        try:
            yield
        finally:
            self._work = before

    def tell(self, line: str) -> None:
        """Say a line at once; nothing else is due for a while."""
        self.spoke()
        if self._say is not None:
            self._say(line)

    def spoke(self) -> None:
        """Something else was said: nothing is due for a while."""
        self._spoken_s = self._clock()

    def beat(self) -> float:
        """Say what is under way if that is due; seconds until it may be due again."""
        silent_s, work = self._clock() - self._spoken_s, self._work
        if silent_s < EVERY_S:
            return EVERY_S - silent_s
        if work is not None and self._say is not None:
            taken_s, expected = self._clock() - work.begin_s, units.seconds(work.expected_s)
            words = f"{units.seconds(taken_s)} so far"
            # Said again, what has passed already would be no expectation.
            if taken_s > work.expected_s > 0.0:
                words += f", longer than the {expected} expected"
            elif work.expected_s:
                words += f", about {expected} expected"
            self._say(f"  still {work.what} ({words})")
        self.spoke()
        return EVERY_S

    def __enter__(self) -> Self:
        if self._say is not None:
            self.spoke()
            # Set by the end of an earlier context, which would end this thread at once.
            self._is_over.clear()
            self._thread = threading.Thread(
                target=self._run, name="ridgeline-heartbeat", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        # Joined, so that no line comes after what is said next.
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        delay_s = EVERY_S
        # What `say` raises, it raises at the lines of the choice as well, where it can be caught.
        with contextlib.suppress(Exception):
            while not self._is_over.wait(delay_s):
                delay_s = self.beat()
