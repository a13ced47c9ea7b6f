"""The seconds that a choice may take: how many are left, when a trace must end, and what is not worth any."""

import math
import time

from ridgeline import units
from ridgeline.errors import OutOfTimeError
from ridgeline.plan import Sync
from ridgeline.planner.exchanges.periods import has_exchange
from ridgeline.planner.trials.trial_steps import HOPELESS
from ridgeline.timeline import Timeline
from ridgeline.workers.agree import share_text
from ridgeline.workers.world import World

MOST_TRACING_SHARE = 0.5
"""Of the seconds that were given, after which the step is not traced in further precisions and formats."""


class Budget:
    """The seconds of a choice, which run from when this is made."""

    def __init__(self, seconds: float | None, world: World) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._world = world
        self._begin = time.monotonic()
        self._fastest_s = math.inf

    @property
    def hopeless_s(self) -> float:
        """Steps that take longer are too slow to be chosen, for all that was measured within this budget."""
        return HOPELESS * self._fastest_s

    def note(self, measured: Timeline, sync: Sync) -> None:
        """Remember what a trial found, the same on all workers; nothing where exchanges are not in it."""
        # A step without its share of an exchange would look fast, and make others hopeless that have theirs.
        if has_exchange(measured, sync):
            self._fastest_s = min(self._fastest_s, measured.step_ns * 1e-9)

    def clock(self) -> float:
        """Seconds since the choice began, by rank 0's clock: all workers decide alike, and all call this."""
        return float(share_text(repr(time.monotonic() - self._begin), self._world))

    def left(self) -> float:
        """Seconds that are left, below 0 once they are over; the same on all workers, see `clock`."""
        # Without a limit nothing is shared: `clock` is a collective.
        return self.seconds if math.isinf(self.seconds) else self.seconds - self.clock()

    def check(self, is_variant: bool) -> None:
        """End a trace for which there is no time, by this worker's own clock; `is_variant`: of another form.

        Raises:
            OutOfTimeError: there is none.
        """
        limit_s = (MOST_TRACING_SHARE if is_variant else 1.0) * self.seconds
        # The own clock, since a trace runs on every worker in its own time, with no moment to meet.
        if time.monotonic() - self._begin > limit_s:
            raise OutOfTimeError(
                f"wanted the step traced within {units.seconds(limit_s)}, got no result; allow more "
                "seconds"
            )
