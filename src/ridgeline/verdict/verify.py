"""`verify`: a prediction against what was measured, span by span, and what follows from it."""

import math
import statistics
from typing import ClassVar

from ridgeline.codec import Noun, Value
from ridgeline.errors import VerificationError
from ridgeline.machine import Machine
from ridgeline.simulator.replay import Replay, replayed
from ridgeline.timeline import LANES, Lane, Timeline
from ridgeline.verdict.text import verdict_lines
from ridgeline.verdict.waterfall import Part, is_fed, waterfall
from ridgeline.verdict.words import counted_words, outlook_words, replay_words, words_for
from ridgeline.workload import Workload

_LEAST_HALF = 4


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

    `error` is what was expected when training began, over measured, minus 1: negative when the step was
    slower. That is the prediction, corrected by the plan's trial where there was one; `error_before` is then
    the error of the prediction before any trial.
    `waterfall` adds up to `measured_ns` exactly. `share_of_ceiling` is the physical limit over the
    measured step, `overhead_fraction` Ridgeline's own time over it; None where that is unknown.
    `hides_overhead` says that this time passed on the host while the device worked, so that it is no
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
    expected_ns: int | None = None
    """The step as expected after the plan's trial; None where no trial corrected the prediction."""
    error_before: float | None = None
    drift: float | None = None
    """The machine's own: second half of the measured steps over the first, minus 1; None for few steps."""
    replay: Replay | None = None
    """What the clock makes of the measured durations; None where no step was recorded frame by frame."""

    @property
    def missing(self) -> tuple[FrameError, ...]:
        """Frames that were predicted but not measured."""
        return tuple(frame for frame in self.frames if frame.measured_ns is None)

    @property
    def extra(self) -> tuple[FrameError, ...]:
        """Frames that were measured but not predicted."""
        return tuple(frame for frame in self.frames if frame.predicted_ns is None)

    @property
    def outlook(self) -> str:
        """What was expected when training began, what was predicted before any trial, and how far off."""
        return outlook_words(
            measured_ns=self.measured_ns,
            predicted_ns=self.predicted_ns,
            expected_ns=self.expected_ns,
        )

    @property
    def replay_outlook(self) -> str:
        """What the clock makes of the measured step, and how far off that is; empty where that is unknown."""
        return "" if self.replay is None else replay_words(self.replay)

    @property
    def text(self) -> str:
        """The verdict for people: at most 80 columns wide."""
        return "\n".join(verdict_lines(self))

    def __repr__(self) -> str:
        return self.text


def verify(
    predicted: Timeline,
    measured: Timeline,
    *,
    expected: Timeline | None = None,
    machine: Machine | None = None,
    workload: Workload | None = None,
    tolerance: float = 0.15,
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
    step_ns = measured.step_ns
    error = judged.step_ns / step_ns - 1.0
    error_before = predicted.step_ns / step_ns - 1.0 if is_corrected else None
    spread, drift = step_spread(measured), step_drift(measured)
    fall = waterfall(predicted, measured, machine, workload)
    words = words_for(
        fall.parts,
        step_ns=step_ns,
        error=error,
        spread=spread,
        drift=drift,
        steps=len(measured.steps_ns),
        is_compiled="compile_s" in predicted.counters,
        is_full=machine is not None and measured.workers >= _most_workers(machine),
        is_fed=is_fed(measured),
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


def _most_workers(machine: Machine) -> int:
    """Workers that do not share a device, or on a CPU a core."""
    return machine.num_gpus if machine.device_kind == "cuda" else machine.host.cores
