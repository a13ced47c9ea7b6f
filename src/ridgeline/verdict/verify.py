"""`verify`: a prediction against what was measured, span by span, and what follows from it."""

import math
import statistics

from ridgeline.errors import VerificationError
from ridgeline.given import checked
from ridgeline.machine import Machine
from ridgeline.simulator.replay import replayed
from ridgeline.timeline import LANES, Lane, Timeline
from ridgeline.verdict.verdict import FrameError, LaneError, Verdict
from ridgeline.verdict.waterfall import is_fed, waterfall
from ridgeline.verdict.words import counted_words, is_preempted, words_for
from ridgeline.workload import Workload

_LEAST_HALF = 4

TOLERANCE = 0.15
"""Largest error of a step that still counts as agreement, unless the caller names another."""


@checked(VerificationError)
def verify(
    predicted: Timeline,
    measured: Timeline,
    *,
    expected: Timeline | None = None,
    machine: Machine | None = None,
    workload: Workload | None = None,
    tolerance: float = TOLERANCE,
) -> Verdict:
    """Compare a predicted step with a measured one.

    Args:
        predicted: From `simulate`; its operator spans explain the computing.
        measured: From a run (any two timelines can be compared).
        expected: The prediction as the plan's trial corrected it (`planner.expectation.expected`): what is
            judged; None, or the prediction itself, where there was no trial.
        machine: With `workload`, explains the computing when `predicted` has no operator spans.
        workload: See `machine`.
        tolerance: `passed` is whether the step's error is within this fraction, either way.

    Raises:
        VerificationError: a step is missing or has no duration, or the tolerance is negative or not finite.
    """
    judged = expected or predicted
    _check(judged, measured, tolerance)
    is_corrected = expected is not None and expected != predicted
    step_ns, spread, drift = measured.step_ns, step_spread(measured), step_drift(measured)
    error = judged.step_ns / step_ns - 1.0
    error_before = predicted.step_ns / step_ns - 1.0 if is_corrected else None
    fall = waterfall(predicted, measured, machine, workload)
    words = words_for(
        fall.parts,
        step_ns=step_ns,
        error=error,
        spread=spread,
        drift=drift,
        steps=len(measured.steps_ns),
        is_compiled="compile_s" in predicted.counters,
        is_full=machine is not None and measured.workers >= machine.num_places,
        is_fed=is_fed(measured),
        is_preempted=is_preempted(measured.counters),
    )
    overhead = measured.counters.get("overhead_ns")
    notes = (*measured.notes, *counted_words(measured.counters), *judged.notes, *fall.notes)
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
        frames=compare_frames(judged, measured),
        lanes=compare_lanes(judged, measured),
        waterfall=fall.parts,
        share_of_ceiling=None if fall.limit_ns is None else fall.limit_ns / step_ns,
        overhead_fraction=None if overhead is None else overhead / step_ns,
        verdict=words.verdict,
        why=words.why,
        next=words.next,
        # Each once: measured and predicted timelines often say the same of a plan.
        notes=tuple(dict.fromkeys(notes)),
        hides_overhead=hides_overhead(measured),
        expected_ns=judged.step_ns if is_corrected else None,
        error_before=error_before,
        drift=drift,
        replay=replayed(measured) if measured.origin == "measured" else None,
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
    # Quartiles rather than a deviation: one step that was disturbed would decide that.
    low, _, high = statistics.quantiles(timeline.steps_ns, n=4, method="inclusive")
    return (high - low) / timeline.step_ns


def step_drift(timeline: Timeline) -> float | None:
    """Median of the later half of the steps over that of the earlier half, minus 1.

    What a machine changes by itself while it does the same work, which no prediction can know. None for
    fewer than eight steps, whose halves say nothing.
    """
    # Of an odd number of steps the middle one belongs to neither half.
    half = len(timeline.steps_ns) // 2
    earlier = statistics.median_low(timeline.steps_ns[:half]) if half >= _LEAST_HALF else 0
    if not earlier:
        return None
    return statistics.median_low(timeline.steps_ns[-half:]) / earlier - 1.0


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
    # NaN is refused as well: it is not above 0.
    if not 0.0 <= tolerance < math.inf:
        raise VerificationError(
            f"wanted a finite tolerance >= 0, got {tolerance:g}; give a fraction such as 0.15"
        )


def _totals(timeline: Timeline) -> dict[tuple[str, Lane], int]:
    totals: dict[tuple[str, Lane], int] = {}
    for span in timeline.frames:
        totals[span.name, span.lane] = totals.get((span.name, span.lane), 0) + span.duration_ns
    return totals
