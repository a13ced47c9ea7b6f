"""Lines of a log about what was refused: one, and then how many there were, however many come."""

import logging
import time

EVERY_S = 10.0
"""Between two lines about the same."""


class Refusals:
    """Says what was refused, but not each time.

    Args:
        log: Where.
        every_s: Between two lines that begin alike.
    """

    def __init__(self, log: logging.Logger, every_s: float = EVERY_S) -> None:
        self._log = log
        self._every_s = every_s
        self._told_s: dict[str, float] = {}
        self._untold: dict[str, int] = {}

    def tell(self, what: str, why: str) -> None:
        """Something was refused.

        Args:
            what: How the line begins: one of a few texts, for these are kept.
            why: How it continues.
        """
        now = time.monotonic()
        # Whoever can connect could else fill a disk with lines.
        if now - self._told_s.get(what, -self._every_s) < self._every_s:
            self._untold[what] = self._untold.get(what, 0) + 1
            return
        self._told_s[what] = now
        self._log.warning("%s: %s%s", what, why, self._others(what))

    def close(self) -> None:
        """Say how many there were that were not reported."""
        for what in [*self._untold]:
            self._log.warning("%s%s", what, self._others(what))

    def _others(self, what: str) -> str:
        untold = self._untold.pop(what, 0)
        return f" ({untold} more since the last line about this)" if untold else ""
