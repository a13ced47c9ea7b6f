"""Time between the steps: what of it a step has to answer for; pure functions, and the tally they need.

From a step's end to the next call a batch is waited for, other steps train, or the script does something of
its own: it evaluates, writes a checkpoint, or waits for a user in a notebook. A feed measures how long it
waits, and every step how long it takes. What is left belongs to the script: to every step, where it is of the
usual length, and to none, where it is much longer.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MUCH = 20
"""A gap so many times as long as the usual one, or as the step, is none that comes with every step."""
LEAST_IDLE_NS = 1_000_000_000
"""A shorter one is not reported."""
LEAST_USUAL_IDLE_NS = 5_000_000_000
"""Where even the usual gap is much longer than the step, idle are those in which a person may have paused."""


class Tally:
    """What this process has spent in steps, and waiting in feeds.

    Attributes:
        waited_ns: In feeds, for batches.
        batches: That feeds have handed out.
        stepping_ns: In calls of steps.
    """

    def __init__(self) -> None:
        self.waited_ns = self.batches = self.stepping_ns = 0


TALLY = Tally()


class StepGap(NamedTuple):
    """Time from a step's end to the next call, on the host.

    `waited_ns` of it a feed waited; in `others_ns` of it other steps of this process trained.
    """

    length_ns: int
    waited_ns: int = 0
    others_ns: int = 0
    is_fed: bool = False

    @property
    def rest_ns(self) -> int:
        """What nothing measured: code of the script's, a loader without a feed, or an idle notebook."""
        return max(0, self.length_ns - self.waited_ns - self.others_ns)


class Gaps(NamedTuple):
    """What of some gaps is no part of the steps behind them: `cuts_ns`, one a gap, and what that sums up.

    `waited_ns` is the usual waiting of a feed, None where none gave a batch; `others_ns` the usual time in
    other steps.
    """

    cuts_ns: tuple[int, ...]
    idle_ns: int
    num_idle: int
    waited_ns: int | None
    others_ns: int


def judge(gaps: Sequence[StepGap], works_ns: Sequence[int]) -> Gaps:
    """Leave out other steps, and what is much longer than usual."""
    if not gaps:
        return Gaps((), 0, 0, None, 0)
    work = statistics.median_low(works_ns)
    usual = statistics.median_low(gap.rest_ns for gap in gaps)
    idle = [gap.rest_ns if is_idle(gap.rest_ns, usual, work) else 0 for gap in gaps]
    waited = [gap.waited_ns for gap in gaps if gap.is_fed]
    return Gaps(
        cuts_ns=tuple(gap.others_ns + rest for gap, rest in zip(gaps, idle, strict=True)),
        idle_ns=sum(idle),
        num_idle=sum(rest > 0 for rest in idle),
        waited_ns=statistics.median_low(waited) if waited else None,
        others_ns=statistics.median_low(gap.others_ns for gap in gaps),
    )


def is_idle(rest_ns: int, usual_ns: int, work_ns: int) -> bool:
    """Whether a gap is none that comes with every step: much longer than the usual one, or than the step."""
    if rest_ns >= LEAST_USUAL_IDLE_NS and rest_ns > MUCH * work_ns:
        return True
    return rest_ns >= LEAST_IDLE_NS and rest_ns > MUCH * usual_ns and rest_ns > work_ns


_new: Callable[..., Any] = tuple.__new__


class GapMeter:
    """Measures the gaps before the steps of one recorder."""

    def __init__(self) -> None:
        self._end_ns: int | None = None
        self._waited_ns = self._stepping_ns = self._batches = 0

    def end(self, now_ns: int) -> None:
        """A step ends; what it took itself is in the tally already."""
        self._end_ns = now_ns
        self._waited_ns, self._stepping_ns = TALLY.waited_ns, TALLY.stepping_ns
        self._batches = TALLY.batches

    def begin(self, now_ns: int) -> StepGap:
        """A step begins."""
        if self._end_ns is None:
            return StepGap(0)
        length = now_ns - self._end_ns
        waited, others = TALLY.waited_ns - self._waited_ns, TALLY.stepping_ns - self._stepping_ns
        if waited or others:
            waited = min(length, waited)
            others = min(length - waited, others)
        # As `Gap(...)`, in a third of its time: every step makes one.
        made: StepGap = _new(StepGap, (length, waited, others, TALLY.batches > self._batches))
        return made
