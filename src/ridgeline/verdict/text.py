"""A verdict as plain text: at most 80 columns wide."""

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ridgeline import units

if TYPE_CHECKING:
    from ridgeline.verdict.verify import Verdict

_WIDTH = 80
_BAR = 24
_MOST_FRAMES = 12


def verdict_lines(verdict: "Verdict") -> Iterator[str]:
    """Verdict, why, next, prediction, waterfall, frames and notes, line by line."""
    yield from textwrap.wrap(verdict.verdict, _WIDTH)
    yield from _headed("why", verdict.why)
    yield from _headed("next", verdict.next)
    outcome = "holds" if verdict.passed else "is off"
    tolerance = units.percent(verdict.tolerance)
    yield from _headed("model", f"{verdict.outlook}: {outcome} (tolerance {tolerance})")
    yield from _headed("clock", verdict.replay_outlook)
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
        yield from _headed("note", note)


def _headed(head: str, text: str) -> list[str]:
    """The lines of a text behind its head; none of an empty one."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{head:<6}", subsequent_indent=" " * 6)


def _own_time(verdict: "Verdict", fraction: float) -> str:
    if not verdict.hides_overhead:
        return f"{units.percent(fraction)} of the step"
    on_host = units.nanoseconds(fraction * verdict.measured_ns)
    return f"{on_host} a step on the host, hidden behind the device"


def _waterfall_lines(verdict: "Verdict") -> Iterator[str]:
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
    yield f"{'measured step':<24}{'=' * _BAR}{total:>12}{'100.0 %':>10}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _time(value_ns: int | None) -> str:
    return "-" if value_ns is None else units.nanoseconds(value_ns)


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f} %"
