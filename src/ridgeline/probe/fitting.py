"""What of a measurement fits into limited seconds, and about how long it takes.

A timing of a step's own operators says far more about that step than the general rates of the machine. So
where seconds are short there are no codecs first, which only steps that may send less need, then fewer
samples of each operator, then no timings of the step in other precisions and memory formats, then one visit
to the rates in place of three; its own operators are timed first, before the rates.
"""

from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.planner.assumed import BYTES_PER_S, DISPATCH_S, FLOPS
from ridgeline.probe.findings import Request
from ridgeline.probe.operators.operators import BUDGET_S
from ridgeline.probe.operators.passes import MOST_PASSES, WHOLE_EVERY
from ridgeline.probe.visits import VISITS
from ridgeline.workload import Workload

START_S = {"cpu": 4.0, "cuda": 12.0}
"""Interpreters, torch, libraries of a GPU, and what the host pays to issue an operator; by device.

Source: measured, H100 with torch 2.11: 11 to 16 s beyond what samples and passes take."""
CEILINGS_S = {"cpu": 2.0, "cuda": 6.0}
COLLECTIVES_S = 4.0
CODECS_S = 5.0
"""Of one setting each, ceilings by device. Source of those of a GPU: measured, an H200 with torch 2.11."""
CHECK_S = 0.5
"""What is measured once for each trace besides its operators."""
FULL_FACTOR = 5.0
"""A full profile takes this many times as long as a quick one."""
TIMED_PASSES = 4
"""Passes over a step that are made however long it takes: two to warm up, one as a whole, and samples."""
PASS_DOUBT = 3.0
"""By this factor a pass may take longer than rates that nobody measured say."""
WHOLE_TOO = WHOLE_EVERY / (WHOLE_EVERY - 1)
"""Passes that are timed as a whole come on top of those that give samples."""
LEAST_SAMPLES_S = 0.3
"""Samples for less are not worth a start."""


class Fitted(NamedTuple):
    """What of a request is to be measured, and what is left out and why."""

    request: Request
    left_out: tuple[str, ...] = ()


def fitted(request: Request, limit_s: float) -> Fitted:
    """As much of a request as `limit_s` seconds have room for, or the least of it where they have none."""
    if expected_s(request) <= limit_s:
        return Fitted(request)
    without, notes = _without_codecs(request, limit_s)
    found = _with_fewer_operators(without, limit_s, notes)
    if request.workload is None or expected_s(found.request) <= limit_s:
        return found
    once = msgspec.structs.replace(without, visits=1)
    note = f"rates were taken once, not {VISITS} times, so that nothing tells how they repeat: time was short"
    return _with_fewer_operators(once, limit_s, (*notes, note))


def _without_codecs(request: Request, limit_s: float) -> tuple[Request, tuple[str, ...]]:
    """The request without codecs, unless it asks for nothing else, and what is to be said of that."""
    without = msgspec.structs.replace(request, codecs=())
    # A request for codecs alone would be left empty.
    if not request.codecs or not (without.settings or without.dispatch):
        return request, ()
    more_s = units.seconds(expected_s(request) - expected_s(without))
    note = (
        f"how long encoding gradients takes was not timed: that takes about {more_s}, and measuring may take "
        f"{units.seconds(limit_s)}"
    )
    return without, (note,)


def _with_fewer_operators(request: Request, limit_s: float, notes: tuple[str, ...]) -> Fitted:
    """As many samples and traces of the step as fit; what is left out is added to the notes."""
    load = request.workload
    if load is None or expected_s(request) <= limit_s:
        return Fitted(request, notes)
    shorter = _with_samples(request, limit_s)
    if not load.variants or expected_s(shorter) <= limit_s:
        return Fitted(shorter, notes)
    alone = msgspec.structs.replace(load, variants=())
    named = ", ".join(f"{v.precision} in {v.memory_format} memory" for v in load.variants)
    note = (
        f"operators of {load.name} were not timed as they are in other plans ({named}): that takes about "
        f"{units.seconds(expected_s(shorter))}, and measuring may take {units.seconds(limit_s)}"
    )
    left = _with_samples(msgspec.structs.replace(request, workload=alone), limit_s)
    return Fitted(left, (*notes, note))


def expected_s(request: Request) -> float:
    """Rough seconds that a request takes."""
    scale = (1.0 if request.quick else FULL_FACTOR) * (request.visits or VISITS) / VISITS
    kind = "cuda" if any(s.device == "cuda" for s in request.settings) else "cpu"
    each = CEILINGS_S[kind] * len(request.ceilings) + COLLECTIVES_S * len(request.collectives)
    each += CODECS_S * len(request.codecs)
    return START_S[kind] + scale * each + sum(_traced_s(request, load) for load in request.traces)


def _traced_s(request: Request, load: Workload) -> float:
    """Seconds to time one trace at all settings; short steps have all their passes before the time is up."""
    pass_s = _pass_seconds(load)
    samples_s = min(_samples_s(request), PASS_DOUBT * WHOLE_TOO * MOST_PASSES * pass_s)
    return (CHECK_S + samples_s + TIMED_PASSES * pass_s) * len(request.timings)


def _samples_s(request: Request) -> float:
    if request.samples_s is not None:
        return request.samples_s
    return max((BUDGET_S[setting.device] for setting in request.timings), default=0.0)


def _with_samples(request: Request, limit_s: float) -> Request:
    """The request with as many seconds of samples for each trace as fit, `LEAST_SAMPLES_S` at least."""
    most_s = _samples_s(request)
    # All traces share what is left when starts, rates and passes are paid for.
    without_s = expected_s(msgspec.structs.replace(request, samples_s=0.0))
    room_s = (limit_s - without_s) / max(1, len(request.traces) * len(request.timings))
    samples_s = min(most_s, max(LEAST_SAMPLES_S, room_s))
    return msgspec.structs.replace(request, samples_s=samples_s)


def _pass_seconds(workload: Workload) -> float:
    """Rough seconds of all operators of a step, one after the other, by rates that are assumed."""
    flops, rate = FLOPS[workload.device]["float32"], BYTES_PER_S[workload.device]
    return sum(max(op.flops / flops, op.bytes_moved / rate, DISPATCH_S) for op in workload.ops)
