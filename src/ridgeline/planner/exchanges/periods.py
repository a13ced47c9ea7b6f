"""What a step takes in a trial of workers that exchange parameters now and then: the mean over a period.

The median of such steps has no exchange in it, so that by medians workers that train alone would always be
the fastest. Steps between two exchanges are all alike: a trial measures some of them and one exchange, which
together give the mean, or whole periods where these are as short. Where not even one exchange was measured it
is priced apart: each measured step is given its predicted share of one.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.plan import Sync
from ridgeline.synchronisation import delay_of, is_exchange_frame, trains_apart, values_of
from ridgeline.timeline import Span, Timeline

PERIODS = "whole_periods"
"""The counter of a timeline whose steps are means over periods: over how many."""
EXCHANGED_SHARE = "exchanged_share"
"""The counter of a timeline whose steps are means from one exchange: of which share of all parameters."""
PRICED_APART = "no whole period of "
"""How the note begins of a trial that says nothing of an exchange."""
MOST_KEPT = 200
"""Steps that a trial can report: as many as the runtime's recorder keeps."""


class Sampling(NamedTuple):
    """The steps that a trial measures.

    Of `steps` in all, `alone` come before the one exchange that is measured; 0 where whole periods are, or
    none.
    """

    steps: int
    alone: int = 0


class PeriodParts(NamedTuple):
    """A period measured in parts: steps alone before an exchange, and the share of all bytes it brought."""

    alone: int
    share: float


def exchange_steps(sync: Sync) -> int:
    """Steps from the start of an exchange of parameters to its end; 0 without any, or where they overlap."""
    if not trains_apart(sync):
        return 0
    delay = delay_of(sync)
    # With overlapping exchanges no stretch of steps holds exactly one of them.
    return delay + 1 if delay < sync.every // int(values_of(sync)["fragments"]) else 0


def sampling(sync: Sync, least: int, step_s: float, longest_s: float) -> Sampling:
    """What to measure so that the mean over a period is known: in parts, where that takes fewer steps.

    `least` steps are wanted for the median; a step without exchange takes `step_s`, all at most `longest_s`.
    """
    whole = period_steps(sync, least, step_s, longest_s)
    others = exchange_steps(sync)
    parts = least + others
    if not others or parts > MOST_KEPT or parts * step_s > longest_s:
        return Sampling(whole)
    # `period_steps` may also give `least`, which is no whole period.
    is_whole = whole >= delay_of(sync) + sync.every
    return Sampling(whole) if is_whole and whole <= parts else Sampling(parts, least)


def period_steps(sync: Sync, least: int, step_s: float, longest_s: float) -> int:
    """Steps to measure so that they are whole periods, or `least` where these take too long.

    The first `delay` steps count apart: in what follows them as many exchanges end as begin.

    Arguments as in `sampling`.
    """
    if not trains_apart(sync):
        return least
    lead = delay_of(sync)
    most = min(MOST_KEPT, math.floor(longest_s / max(step_s, 1e-9))) - lead
    # As many periods as give the median its steps: a part of one would have too many exchanges, or too few.
    periods = min(math.ceil(least / sync.every), most // sync.every)
    return lead + periods * sync.every if periods >= 1 else least


def over_periods(measured: Timeline, sync: Sync) -> Timeline:
    """A measured timeline whose steps are the means of whole periods, the last ones of those recorded.

    It stays as it is where no whole period was recorded, or every step has its exchange.
    """
    steps = measured.steps_ns
    # No exchange ends within the first `delay` steps.
    periods = (len(steps) - delay_of(sync)) // sync.every if trains_apart(sync) else 0
    if periods < 1:
        return measured
    # The last ones: the first steps of a trial may still settle.
    last = steps[-periods * sync.every :]
    means = [
        sum(last[first : first + sync.every]) // sync.every
        for first in range(0, len(last), sync.every)
    ]
    counters = {**measured.counters, PERIODS: float(periods)}
    return _lengthened(measured, means, counters, note="")


def over_parts(measured: Timeline, sync: Sync, parts: PeriodParts) -> Timeline:
    """A measured timeline whose steps are means over a period, from steps without and with an exchange.

    It stays as it is where the exchange was not measured to its end.

    `measured` has `parts.alone` steps without exchange, then those from the start of one to its end. An
    exchange of all parameters takes as much longer as these have more bytes.
    """
    alone, others = measured.steps_ns[: parts.alone], measured.steps_ns[parts.alone :]
    # A trial that was cut short ended somewhere inside the exchange.
    if not alone or len(others) != exchange_steps(sync):
        return measured
    # Against the median: single steps of a trial may have been held up by something else.
    extra_ns = max(0.0, sum(others) - len(others) * statistics.median(alone))
    share_ns = round(extra_ns / parts.share / sync.every)
    counters = {**measured.counters, EXCHANGED_SHARE: parts.share}
    return _lengthened(measured, [step + share_ns for step in alone], counters, note="")


def has_exchange(measured: Timeline, sync: Sync) -> bool:
    """Whether the steps of a trial have what exchanges take; they lack it where none ended."""
    return not trains_apart(sync) or not {PERIODS, EXCHANGED_SHARE}.isdisjoint(measured.counters)


def with_share(measured: Timeline, predicted: Timeline, sync: Sync) -> Timeline:
    """A trial's timeline in which every step has its share of an exchange, as far as it is not measured."""
    if has_exchange(measured, sync):
        return measured
    share = sum(span.duration_ns for span in predicted.frames if is_exchange_frame(span.name))
    note = (
        f"{PRICED_APART}{sync.every} steps was tried, nor a whole exchange: each measured step is given "
        f"the predicted share of one, {units.nanoseconds(share)}"
    )
    # The counters stay, so that `has_exchange` still says that none was measured.
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
