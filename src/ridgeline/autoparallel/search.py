"""The search of `rl.parallelize`: make the ways, check them, time them in turns, keep one."""

import statistics
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from ridgeline.autoparallel.graphs.gradients import close_call
from ridgeline.autoparallel.graphs.program import Program
from ridgeline.autoparallel.report import AS_WRITTEN, CandidateRow, ParallelReport
from ridgeline.autoparallel.selection import SERIAL, ParallelChoice, choose
from ridgeline.autoparallel.trial import compare, take_turns
from ridgeline.autoparallel.ways import Offer, ProgramWay
from ridgeline.errors import EquivalenceError, PlanError
from ridgeline.machine import Quantity

Mode = Literal["auto", "serial", "parallel"]


class SearchResult(NamedTuple):
    """The outcome of a search; `call` is None where the function runs as it was written."""

    name: str
    way: ProgramWay | None
    call: Callable[..., Any] | None
    reason: str
    measured: dict[str, list[float]]
    rows: dict[str, CandidateRow]


def search(
    fn: Callable[..., Any],
    program: Program,
    args: tuple[Any, ...],
    offered: Offer,
    mode: Mode,
    as_tried: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
) -> SearchResult:
    """Make, check and time the ways; keep one, close the others.

    `as_tried` makes of each what is compared and timed: forward and backward, where that is the matter.
    """
    tried: Callable[[Callable[..., Any]], Callable[..., Any]] = as_tried or (lambda call: call)
    ways = {way.name: way for way in offered.ways if mode != "serial" or way.name == SERIAL}
    rows = {AS_WRITTEN: CandidateRow(name=AS_WRITTEN)}
    calls: dict[str, Callable[..., Any]] = {}
    name = AS_WRITTEN
    try:
        for way in ways.values():
            call = way.make()
            difference = compare(tried(fn), tried(call), program, args)
            note = ""
            if difference.is_equal:
                calls[way.name] = call
            else:
                close_call(call)
                note = f"not used: differs in {difference.where}, accepted are {difference.tolerance:.0e}"
            rows[way.name] = CandidateRow(
                name=way.name,
                lanes=way.schedule.num_lanes,
                syncs=len(way.schedule.syncs),
                predicted_s=way.predicted_s,
                difference=difference.difference,
                note=note,
            )
        runs = {name: tried(call) for name, call in {AS_WRITTEN: fn, **calls}.items()}
        measured = take_turns(runs, program, args)
        choice = _choose(measured, mode, rows)
        name = choice.name
    finally:
        # Also after an error: threads and graphs of ways that nobody uses would stay.
        for other, call in calls.items():
            if other != name:
                close_call(call)
    return SearchResult(name, ways.get(name), calls.get(name), choice.reason, measured, rows)


def _choose(
    measured: dict[str, list[float]], mode: Mode, rows: dict[str, CandidateRow]
) -> ParallelChoice:
    """The fastest way; as written unless something is gained, or another one was asked for."""
    parallel = {name: own for name, own in measured.items() if name not in (AS_WRITTEN, SERIAL)}
    if mode == "serial" and SERIAL in measured:
        return ParallelChoice(name=SERIAL, reason="asked for")
    if mode == "parallel":
        if not parallel:
            refused = [row for row in rows.values() if row.note]
            if refused:
                raise EquivalenceError(
                    "wanted a way on several lanes with the results of the function, got none: "
                    f"{refused[0].name} {refused[0].note}; use mode='serial'"
                )
            raise PlanError(
                "wanted a way on several lanes, got a function with no independent parts (or lanes=1); use "
                "mode='auto', which runs it serially"
            )
        best = min(parallel, key=lambda name: statistics.median(parallel[name]))
        return ParallelChoice(name=best, reason="requested: the fastest on several lanes")
    if SERIAL not in measured:
        return ParallelChoice(name=AS_WRITTEN, reason=rows[SERIAL].note)
    # In two steps: several lanes must gain over one lane, and the winner over the function as it was written.
    first = choose({name: own for name, own in measured.items() if name != AS_WRITTEN})
    final = choose({name: measured[name] for name in (AS_WRITTEN, first.name)}, AS_WRITTEN)
    if final.name == AS_WRITTEN:
        reason = first.reason if first.name == SERIAL else final.reason
        return ParallelChoice(name=AS_WRITTEN, reason=reason)
    if first.name == SERIAL:
        reason = (
            f"{first.reason}; traced it runs {final.times_faster:.2f} times faster than as written"
        )
        return ParallelChoice(name=SERIAL, reason=reason)
    return first


def report_of(subject: str, offered: Offer, found: SearchResult) -> ParallelReport:
    """The report of a search."""
    rows = [_timed(row, found.measured.get(name)) for name, row in found.rows.items()]
    medians = {row.name: row.measured_s for row in rows if row.measured_s is not None}
    return ParallelReport(
        subject=subject,
        device=offered.device,
        operations=offered.operations,
        edges=offered.edges,
        serial_s=min(medians[name] for name in (AS_WRITTEN, SERIAL) if name in medians),
        predicted_s=None if found.way is None else found.way.predicted_s,
        measured_s=medians[found.name],
        bounds=offered.bounds,
        lanes=1 if found.way is None else found.way.schedule.num_lanes,
        syncs=0 if found.way is None else len(found.way.schedule.syncs),
        chosen=found.name,
        reason=found.reason,
        candidates=tuple(rows),
    )


def _timed(row: CandidateRow, samples: list[float] | None) -> CandidateRow:
    if samples is None:
        return row
    found = Quantity.measured(samples, "s")
    return msgspec.structs.replace(row, measured_s=found.value, low_s=found.low, high_s=found.high)
