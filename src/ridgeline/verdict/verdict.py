"""`Verdict`: what came of a prediction, and how it reads as plain text of at most 80 columns."""

import textwrap
from collections.abc import Iterator
from typing import ClassVar

from ridgeline import units
from ridgeline.codec import Noun, Value
from ridgeline.simulator.replay import Replay
from ridgeline.timeline import Lane
from ridgeline.verdict.waterfall import Part
from ridgeline.verdict.words import outlook_words, replay_words

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


def verdict_lines(verdict: Verdict) -> Iterator[str]:
    """Verdict, why, next, prediction, waterfall, frames and notes, line by line."""
    yield from textwrap.wrap(verdict.verdict, _WIDTH)
    yield from _headed("why", verdict.why)
    yield from _headed("next", verdict.next)
    outcome = "holds" if verdict.passed else "is off"
    tolerance = units.percent(verdict.tolerance)
    yield from _headed("model", f"{verdict.outlook}: {outcome} (tolerance {tolerance})")
    yield from _headed("clock", verdict.replay_outlook)
    yield ""
    yield from waterfall_lines(verdict)
    yield ""
    held_against = "predicted" if verdict.expected_ns is None else "expected"
    yield f"{'frame':<32}{held_against:>12}{'measured':>12}{'error':>10}"
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
        yield from _headed("note", note)


def _headed(head: str, text: str) -> list[str]:
    """The lines of a text behind its head; none of an empty one."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{head:<6}", subsequent_indent=" " * 6)


def _own_time(verdict: Verdict, fraction: float) -> str:
    if not verdict.hides_overhead:
        return f"{units.percent(fraction)} of the step"
    on_host = units.nanoseconds(fraction * verdict.measured_ns)
    return f"{on_host} a step on the host, hidden behind the device"


def waterfall_lines(verdict: Verdict) -> Iterator[str]:
    """One floating bar a part, each from where the last one ended."""
    reached = 0
    for part in verdict.waterfall:
        # Both ends come from the running sum, so that rounded bars join without gaps.
        start = round(_BAR * reached / verdict.measured_ns)
        reached += part.ns
        end = round(_BAR * reached / verdict.measured_ns)
        bar = " " * start + "#" * (end - start)
        share = units.percent(part.ns / verdict.measured_ns)
        yield f"{part.name:<24}{bar:<{_BAR}}{units.nanoseconds(part.ns):>12}{share:>10}"
    total = units.nanoseconds(verdict.measured_ns)
    yield f"{'step':<24}{'=' * _BAR}{total:>12}{'100.0 %':>10}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _time(value_ns: int | None) -> str:
    return "-" if value_ns is None else units.nanoseconds(value_ns)


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"
