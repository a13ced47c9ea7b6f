"""When those that others wait for are named on stderr, and in which words.

At once, where it is sure that a worker does not come: it has closed the step that others are in, or its
process is gone. After half a minute, where it may only be slow.
"""

import socket
from collections.abc import Collection, Mapping

import psutil

from ridgeline import units
from ridgeline.workers.roll_call import Row, absence_text, absent, is_ahead

SURE_AFTER_S = 2.0
"""Seconds without progress after which those are named that are sure not to come."""
TOLD_AFTER_S = 30.0
"""The same for those that are behind; then twice as long, since a long evaluation is no fault."""
GONE = "its process is gone"
_CLOSED = "after closing its TrainStep"


class Looks:
    """How long a worker has been at one place, and when the next look at the others is due."""

    def __init__(self) -> None:
        self._place, self._since_s, self._due_s = (-1, -1), 0.0, SURE_AFTER_S

    def look(self, place: tuple[int, int], now_s: float) -> float:
        """Seconds without progress where a look is due, else 0."""
        if place != self._place:
            self._place, self._since_s, self._due_s = place, now_s, SURE_AFTER_S
        waited_s = now_s - self._since_s
        if waited_s < self._due_s:
            return 0.0
        is_early = self._due_s < TOLD_AFTER_S
        self._due_s = min(2 * self._due_s, TOLD_AFTER_S) if is_early else 2 * self._due_s
        return waited_s

    def has_told(self) -> None:
        """What is sure is said once, and again with all the rest."""
        self._due_s = max(self._due_s, TOLD_AFTER_S)


def after_closing(name: str) -> str:
    """What a worker does that has closed its `TrainStep` of that name, and has begun nothing since."""
    return f"{_CLOSED} {name!r}"


def is_gone(row: Row) -> bool:
    """Whether the process of a worker of this host has ended."""
    if row.host != socket.gethostname():
        return False
    try:
        # A process that ended stays visible until its launcher has waited for it, which may take seconds.
        return psutil.Process(row.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def told_line(
    mine: Row,
    rows: Mapping[int, Row],
    ranks: Collection[int],
    gone: Collection[int],
    sure: Collection[int],
    waited_s: float,
) -> str:
    """What is said of those that are behind; empty where there are none, or another worker says it.

    Of all that wait, the first worker does. `rows` are the last words of the others, `gone` the ranks whose
    processes have ended; nothing is said where none of those that are behind is among `sure`.
    """
    if mine.doing.startswith(_CLOSED):
        return ""  # it waits for nobody
    # Those that trained to their end are not waited for: they had begun all that this worker has begun.
    done = {r for r, row in rows.items() if is_ahead(row, mine)}
    rows = {r: row for r, row in rows.items() if r not in done}
    left = [r for r in ranks if r not in done]
    absences = absent(mine, rows, left, {r: GONE for r in gone if r not in done})
    missing = {absence.rank for absence in absences}
    if missing.isdisjoint(sure) or not missing.issuperset(r for r in left if r < mine.rank):
        return ""
    text = absence_text(mine.doing.removeprefix("in "), mine, absences, rows, len(ranks))
    return f"ridgeline: no progress for {units.seconds(waited_s)}: {text}\n"
