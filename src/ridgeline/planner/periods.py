"""What a step takes in a trial of workers that exchange parameters now and then: the mean over whole periods.

The median of such steps has no exchange in it, so that by medians workers that train alone would always be
the fastest. A trial that runs for whole periods tells the mean; where that takes too long, the exchange is
priced apart: each measured step is given its predicted share of one.
"""

import math
from collections.abc import Sequence

import msgspec

from ridgeline import units
from ridgeline.plan import Sync
from ridgeline.synchronisation import delay_of, is_exchange_frame, trains_apart
from ridgeline.timeline import Span, Timeline

PERIODS = "whole_periods"
"""The counter of a timeline whose steps are means over periods: over how many."""
PRICED_APART = "no whole period of "
"""How the note begins of a trial that tells nothing of an exchange."""
MOST_KEPT = 200
"""Steps that a trial can tell of: as many as the runtime's recorder keeps."""


def period_steps(sync: Sync, least: int, step_s: float, longest_s: float) -> int:
    """Steps to measure so that they are whole periods, or `least` where these take too long.

    The first `delay` steps count apart: in what follows them as many exchanges end as begin.

    Args:
        sync: The plan's.
        least: Steps that the median wants.
        step_s: Seconds of a step without exchange.
        longest_s: That the steps may take.
    """
    if not trains_apart(sync):
        return least
    lead = delay_of(sync)
    most = min(MOST_KEPT, math.floor(longest_s / max(step_s, 1e-9))) - lead
    periods = min(math.ceil(least / sync.every), most // sync.every)
    return lead + periods * sync.every if periods >= 1 else least


def over_periods(measured: Timeline, sync: Sync) -> Timeline:
    """A measured timeline whose steps are the means of whole periods, the last ones of those recorded.

    It stays as it is where no whole period was recorded, or every step has its exchange.

    Args:
        measured: Of one worker; the last steps of a trial.
        sync: The plan's.
    """
    steps = measured.steps_ns
    periods = (len(steps) - delay_of(sync)) // sync.every if trains_apart(sync) else 0
    if periods < 1:
        return measured
    last = steps[-periods * sync.every :]
    means = [
        sum(last[first : first + sync.every]) // sync.every
        for first in range(0, len(last), sync.every)
    ]
    counters = {**measured.counters, PERIODS: float(periods)}
    return _lengthened(measured, means, counters, note="")


def with_share(measured: Timeline, predicted: Timeline, sync: Sync) -> Timeline:
    """A trial's timeline in which every step has its share of an exchange, as far as it is not measured.

    Args:
        measured: By `over_periods`, where a whole period was recorded.
        predicted: The simulated step of the same plan.
        sync: The plan's.
    """
    if not trains_apart(sync) or PERIODS in measured.counters:
        return measured
    share = sum(span.duration_ns for span in predicted.frames if is_exchange_frame(span.name))
    note = (
        f"{PRICED_APART}{sync.every} steps was tried: each measured step is given the predicted share of an "
        f"exchange, {units.nanoseconds(share)}"
    )
    return _lengthened(measured, [step + share for step in measured.steps_ns], {}, note)


def _lengthened(
    measured: Timeline, steps_ns: Sequence[int], counters: dict[str, float], note: str
) -> Timeline:
    """The timeline with other steps; the exchange of its frames, which stands last, lasts until their end."""
    found = msgspec.structs.replace(
        measured,
        steps_ns=tuple(steps_ns),
        counters=counters or measured.counters,
        notes=(*measured.notes, *([note] if note else [])),
    )
    spans = tuple(_until(span, found.step_ns) for span in measured.spans)
    return msgspec.structs.replace(found, spans=spans)


def _until(span: Span, end_ns: int) -> Span:
    if not (is_exchange_frame(span.name) or span.name == "wait"):
        return span
    return msgspec.structs.replace(span, end_ns=max(span.end_ns, end_ns))
