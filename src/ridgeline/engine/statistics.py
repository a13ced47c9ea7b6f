"""What an engine has done so far, in numbers."""

from ridgeline import units
from ridgeline.codec import Value


class EngineStatistics(Value, frozen=True, kw_only=True):
    """Counts since the engine was made. Tasks that delete a variable or clear its error count as well.

    `pushed` is `done + failed + skipped + cancelled` plus what is pending.
    """

    pushed: int
    done: int
    """Ran to the end."""
    failed: int
    """Raised."""
    skipped: int
    """Did not run, since a variable they touch is poisoned."""
    cancelled: int
    """Did not run, since they were cancelled."""
    most_pending: int
    """Most tasks that were unfinished at one time."""
    most_bytes: int
    """Most bytes, as given to the pushes, that were unfinished at one time."""
    blocked_s: float
    """Seconds that pushing threads waited at the bounds and at the ends of batches, together."""
    busy_s: dict[str, float] = {}
    """Seconds of work by lane, summed over its threads."""

    @property
    def pending(self) -> int:
        """Tasks that were unfinished when this was asked for."""
        return self.pushed - self.done - self.failed - self.skipped - self.cancelled

    def __repr__(self) -> str:
        others = ", ".join(
            f"{count} {what}"
            for count, what in (
                (self.failed, "failed"),
                (self.skipped, "skipped"),
                (self.cancelled, "cancelled"),
                (self.pending, "pending"),
            )
            if count
        )
        busy = ", ".join(f"{lane} {units.seconds(s)}" for lane, s in self.busy_s.items())
        return (
            f"EngineStatistics({self.pushed} pushed, {self.done} done"
            + (f", {others}" if others else "")
            + f"; at most {self.most_pending} pending, {units.num_bytes(self.most_bytes)}; "
            f"blocked {units.seconds(self.blocked_s)}; busy: {busy or 'nothing'})"
        )
