"""`verify`: a prediction against what was measured, span by span, and what follows from it."""

import math
import statistics
import textwrap
from collections.abc import Iterator
from typing import ClassVar

from ridgeline import units
from ridgeline.codec import Noun, Value
from ridgeline.errors import VerificationError
from ridgeline.machine import Machine
from ridgeline.timeline import LANES, Lane, Timeline
from ridgeline.verdict.waterfall import Part, waterfall
from ridgeline.verdict.words import counted_words, words_for
from ridgeline.workload import Workload

_WIDTH = 80
_BAR = 24
_MOST_FRAMES = 12


class FrameError(Value, frozen=True, kw_only=True):
    """One frame in both timelines; None where a timeline lacks it."""

    name: str
    lane: Lane
    predicted_ns: int | None
    measured_ns: int | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1; None when either is missing or nothing was measured."""
        if self.predicted_ns is None or not self.measured_ns:
            return None
        return self.predicted_ns / self.measured_ns - 1.0


class LaneError(Value, frozen=True, kw_only=True):
    """Time in which a lane was busy, in both timelines."""

    lane: Lane
    predicted_ns: int
    measured_ns: int

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1; None when nothing was measured."""
        return self.predicted_ns / self.measured_ns - 1.0 if self.measured_ns else None


class Verdict(Noun, frozen=True, kw_only=True):
    """What came of a prediction, where the step's time went, and what to do next.

    `error` is predicted over measured, minus 1: negative when the step was slower than predicted.
    `waterfall` adds up to `measured_ns` exactly. `share_of_ceiling` is the physical limit over the
    measured step, `overhead_fraction` Ridgeline's own time over it; None where nothing tells.
    `hides_overhead` tells that this time passed on the host while the device worked, so that it is no
    part of the step. `notes` begin with what the run could not do as planned and what it counted.
    """

    kind: ClassVar[str] = "verdict"

    title: str
    workers: int
    predicted_ns: int
    measured_ns: int
    num_steps: int
    spread: float
    """Distance of the quartiles of the measured steps over their median."""
    error: float
    tolerance: float
    passed: bool
    frames: tuple[FrameError, ...]
    lanes: tuple[LaneError, ...]
    waterfall: tuple[Part, ...]
    share_of_ceiling: float | None
    overhead_fraction: float | None
    verdict: str
    why: str
    next: str
    notes: tuple[str, ...] = ()
    hides_overhead: bool = False

    @property
    def missing(self) -> tuple[FrameError, ...]:
        """Frames that were predicted but not measured."""
        return tuple(frame for frame in self.frames if frame.measured_ns is None)

    @property
    def extra(self) -> tuple[FrameError, ...]:
        """Frames that were measured but not predicted."""
        return tuple(frame for frame in self.frames if frame.predicted_ns is None)

    @property
    def text(self) -> str:
        """The verdict for people: at most 80 columns wide."""
        return "\n".join(_lines(self))

    def __repr__(self) -> str:
        return self.text


def verify(
    predicted: Timeline,
    measured: Timeline,
    *,
    machine: Machine | None = None,
    workload: Workload | None = None,
    tolerance: float = 0.15,
) -> Verdict:
    """Compare a predicted step with a measured one.

    Args:
        predicted: From `simulate`; its operator spans explain the computing.
        measured: From a run (any two timelines can be compared).
        machine: With `workload`, explains the computing when `predicted` has no operator spans.
        workload: See `machine`.
        tolerance: `passed` is whether the step's error is within this fraction, either way.

    Raises:
        VerificationError: a step is missing or has no duration, or the tolerance is negative or not finite.
    """
    _check(predicted, measured, tolerance)
    step_ns = measured.step_ns
    error = predicted.step_ns / step_ns - 1.0
    spread = step_spread(measured)
    fall = waterfall(predicted, measured, machine, workload)
    words = words_for(
        fall.parts,
        step_ns=step_ns,
        error=error,
        spread=spread,
        steps=len(measured.steps_ns),
        predicted_ns=predicted.step_ns,
        is_compiled="compile_s" in predicted.counters,
        is_full=machine is not None and measured.workers >= _most_workers(machine),
    )
    overhead = measured.counters.get("overhead_ns")
    notes = (
        *measured.notes,
        *counted_words(measured.counters),
        *predicted.notes,
        *fall.notes,
    )
    return Verdict(
        title=measured.title,
        workers=measured.workers,
        predicted_ns=predicted.step_ns,
        measured_ns=step_ns,
        num_steps=len(measured.steps_ns),
        spread=spread,
        error=error,
        tolerance=tolerance,
        passed=abs(error) <= tolerance,
        frames=compare_frames(predicted, measured),
        lanes=compare_lanes(predicted, measured),
        waterfall=fall.parts,
        share_of_ceiling=None if fall.limit_ns is None else fall.limit_ns / step_ns,
        overhead_fraction=None if overhead is None else overhead / step_ns,
        verdict=words.verdict,
        why=words.why,
        next=words.next,
        notes=tuple(dict.fromkeys(notes)),
        hides_overhead=hides_overhead(measured),
    )


def compare_frames(predicted: Timeline, measured: Timeline) -> tuple[FrameError, ...]:
    """Frames by name and lane, in the order of the prediction, then what only was measured.

    Frames of one name on one lane are summed.
    """
    totals = [_totals(predicted), _totals(measured)]
    return tuple(
        FrameError(
            name=name,
            lane=lane,
            predicted_ns=totals[0].get((name, lane)),
            measured_ns=totals[1].get((name, lane)),
        )
        for name, lane in dict.fromkeys((*totals[0], *totals[1]))
    )


def compare_lanes(predicted: Timeline, measured: Timeline) -> tuple[LaneError, ...]:
    """The lanes on which something ran in either timeline, from the host outwards."""
    return tuple(
        LaneError(
            lane=lane, predicted_ns=predicted.busy_ns(lane), measured_ns=measured.busy_ns(lane)
        )
        for lane in LANES
        if predicted.lane(lane) or measured.lane(lane)
    )


def hides_overhead(timeline: Timeline) -> bool:
    """Whether Ridgeline's own time passed on the host while the device worked on the step before.

    The run counts `hidden_overhead` where it issues steps ahead; as soon as the host needs the whole step
    for them nothing is hidden any more.
    """
    overhead = timeline.counters.get("overhead_ns", 0.0)
    return timeline.counters.get("hidden_overhead") == 1.0 and overhead < timeline.step_ns


def step_spread(timeline: Timeline) -> float:
    """Distance of the quartiles of the steps over their median; 0 for a single step."""
    if len(timeline.steps_ns) < 2 or not timeline.step_ns:
        return 0.0
    low, _, high = statistics.quantiles(timeline.steps_ns, n=4, method="inclusive")
    return (high - low) / timeline.step_ns


def _check(predicted: Timeline, measured: Timeline, tolerance: float) -> None:
    for timeline, name in ((predicted, "predicted"), (measured, "measured")):
        if not timeline.steps_ns:
            raise VerificationError(
                f"wanted a {name} timeline with at least one step, got none in {timeline.title!r}; record "
                "at least one step after the warm-up"
            )
    if measured.step_ns <= 0:
        raise VerificationError(
            f"wanted a measured step that takes time, got {measured.step_ns} ns in {measured.title!r}; "
            "record at least one step after the warm-up"
        )
    if not 0.0 <= tolerance < math.inf:
        raise VerificationError(
            f"wanted a finite tolerance >= 0, got {tolerance:g}; give a fraction such as 0.15"
        )


def _totals(timeline: Timeline) -> dict[tuple[str, Lane], int]:
    totals: dict[tuple[str, Lane], int] = {}
    for span in timeline.frames:
        totals[span.name, span.lane] = totals.get((span.name, span.lane), 0) + span.duration_ns
    return totals


def _lines(verdict: Verdict) -> Iterator[str]:
    yield from textwrap.wrap(verdict.verdict, _WIDTH)
    for head, text in (("why", verdict.why), ("next", verdict.next)):
        yield from textwrap.wrap(
            text, _WIDTH, initial_indent=f"{head:<6}", subsequent_indent=" " * 6
        )
    outcome = "holds" if verdict.passed else "is off"
    yield (
        f"{'model':<6}predicted {units.nanoseconds(verdict.predicted_ns)}, measured "
        f"{units.nanoseconds(verdict.measured_ns)}: {100 * verdict.error:+.1f} %, {outcome} "
        f"(tolerance {units.percent(verdict.tolerance)})"
    )
    yield ""
    yield from _waterfall_lines(verdict)
    yield ""
    yield f"{'frame':<32}{'predicted':>12}{'measured':>12}{'error':>10}"
    shown = sorted(verdict.frames, key=lambda f: -max(f.predicted_ns or 0, f.measured_ns or 0))
    for frame in shown[:_MOST_FRAMES]:
        yield (
            f"{_cut(frame.name, 31):<32}{_time(frame.predicted_ns):>12}{_time(frame.measured_ns):>12}"
            f"{_signed(frame.error):>10}"
        )
    if len(shown) > _MOST_FRAMES:
        yield f"and {len(shown) - _MOST_FRAMES} shorter frames"
    if verdict.share_of_ceiling is not None:
        yield f"share of the ceiling: {units.percent(verdict.share_of_ceiling)}"
    if verdict.overhead_fraction is not None:
        yield f"Ridgeline's own time: {_own_time(verdict, verdict.overhead_fraction)}"
    for note in verdict.notes:
        yield from textwrap.wrap(
            note, _WIDTH, initial_indent=f"{'note':<6}", subsequent_indent=" " * 6
        )


def _own_time(verdict: Verdict, fraction: float) -> str:
    if not verdict.hides_overhead:
        return f"{units.percent(fraction)} of the step"
    on_host = units.nanoseconds(fraction * verdict.measured_ns)
    return f"{on_host} a step on the host, hidden behind the device"


def _waterfall_lines(verdict: Verdict) -> Iterator[str]:
    """One floating bar a part, each from where the last one ended."""
    reached = 0
    for part in verdict.waterfall:
        start = round(_BAR * reached / verdict.measured_ns)
        reached += part.ns
        end = round(_BAR * reached / verdict.measured_ns)
        bar = " " * start + "#" * (end - start)
        share = units.percent(part.ns / verdict.measured_ns)
        yield f"{part.name:<24}{bar:<{_BAR}}{units.nanoseconds(part.ns):>12}{share:>10}"
    total = units.nanoseconds(verdict.measured_ns)
    yield f"{'measured step':<24}{'=' * _BAR}{total:>12}{'100.0 %':>10}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _time(value_ns: int | None) -> str:
    return "-" if value_ns is None else units.nanoseconds(value_ns)


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"


def _most_workers(machine: Machine) -> int:
    """Workers that do not share a device, or on a CPU a core."""
    return machine.num_gpus if machine.device_kind == "cuda" else machine.host.cores
