"""Which mode to keep: a pure decision over measured times.

The fastest measured mode wins, if its gain is more than noise: what was compiled is paid by then. Where the
number of calls is known, that is weighed before, against what compiling is expected to take.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline import units
from ridgeline.errors import PlanError
from ridgeline.plan import Execution


class ModeTiming(NamedTuple):
    """Time of one call in a mode, in seconds: median and quartiles; only of modes that are equivalent."""

    mode: Execution
    call_s: float
    low_s: float
    high_s: float


class ModeDecision(NamedTuple):
    """The mode to keep, and why."""

    mode: Execution
    reason: str


def decide(measurements: Sequence[ModeTiming]) -> ModeDecision:
    """The fastest mode whose gain is real; among those that noise cannot distinguish the simplest.

    Args:
        measurements: Simplest mode first; the first one is the program as written (eager).

    Returns:
        A mode whose median is never above that of the first.

    Raises:
        PlanError: nothing was measured.
    """
    if not measurements:
        raise PlanError("wanted at least one measured mode to decide on, got none; measure eager")
    plain = measurements[0]
    best = min(measurements, key=lambda one: one.call_s)
    # Simplest first: so the first that noise cannot tell from the best is the simplest of these.
    chosen = next(
        one
        for one in measurements
        # Never one slower than eager in the median, even within the spread: `auto` must not lose.
        if one is best or (one.call_s <= plain.call_s and not _is_slower(one, best))
    )
    return ModeDecision(chosen.mode, _reason(chosen, best, plain, len(measurements)))


def break_even_calls(eager_s: float, call_s: float, compile_s: float) -> int | None:
    """Number of calls after which the compile time is earned back; None where it never is.

    Source: `compile_s + n * call_s <= n * eager_s`, solved for n.
    """
    if call_s >= eager_s:
        return None
    return math.ceil(compile_s / (eager_s - call_s))


def why_not_worth(
    expected_s: float, left_s: float, best_call_s: float, calls: int | None
) -> str | None:
    """Why a mode should not even be compiled, or None if it should."""
    if expected_s > left_s:
        return (
            f"expected to take {units.seconds(expected_s)} to compile, "
            f"{units.seconds(max(left_s, 0.0))} of the budget are left"
        )
    if calls is not None and expected_s > calls * best_call_s:
        return (
            f"expected to take {units.seconds(expected_s)} to compile, and all {calls} calls take only "
            f"{units.seconds(calls * best_call_s)} without it"
        )
    return None


def _is_slower(measurement: ModeTiming, best: ModeTiming) -> bool:
    """Whether the median of one lies outside the quartiles of the other: more than the spread."""
    return measurement.call_s > best.high_s or measurement.low_s > best.call_s


def _reason(chosen: ModeTiming, best: ModeTiming, plain: ModeTiming, num_measured: int) -> str:
    if chosen is plain and best is plain:
        if num_measured == 1:
            return "nothing else is offered, equivalent and inside the budget"
        return f"no other mode is faster: a call {units.seconds(plain.call_s)}"
    if chosen is best:
        gain = plain.call_s / best.call_s if best.call_s else math.inf
        return (
            f"fastest of {num_measured} measured: a call {units.seconds(best.call_s)}, "
            f"{gain:.2f} x {plain.mode} ({units.seconds(plain.call_s)})"
        )
    return (
        f"{best.mode} ({units.seconds(best.call_s)} for a call) is faster than {chosen.mode} "
        f"({units.seconds(chosen.call_s)}) by less than the spread of the measurement: the simpler is kept"
    )
