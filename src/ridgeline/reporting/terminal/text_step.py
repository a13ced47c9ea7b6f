"""A step as text for the terminal: lanes over time, and the verdict with its waterfall."""

from collections.abc import Sequence
from functools import partial

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from ridgeline import units
from ridgeline.reporting.charts.chart_timeline import kind
from ridgeline.reporting.terminal.fitted import FittedBand
from ridgeline.reporting.terminal.text import title
from ridgeline.simulator.memory import PEAK_CATEGORIES
from ridgeline.synchronisation import algorithm_of
from ridgeline.timeline import LANES, Span, Timeline
from ridgeline.verdict import Verdict
from ridgeline.verdict.verdict import waterfall_lines

LANE_WIDTH = 72
_HELD_FOR = ("parameters", "gradients", "optimizer state", "activations", "workspaces of operators")
"""In the order of `PEAK_CATEGORIES`."""
_LOOKS = {
    "input": ("i", "white"),
    "step": ("S", "blue"),
    "forward": ("F", "blue"),
    "backward": ("B", "cyan"),
    "wait": ("w", "red"),
    "optimizer": ("O", "magenta"),
    "bucket": ("R", "yellow"),
    "all_gather": ("P", "yellow"),
    "broadcast_buffers": ("b", "green"),
    "other": ("x", "white"),
}
"""Kind of a frame to its letter and its colour."""


def timeline_text(
    timelines: Sequence[Timeline], width: int = LANE_WIDTH, *, headings: Sequence[str] | None = None
) -> RenderableType:
    """Timelines below each other on one scale: a row a lane, a letter for what runs.

    Args:
        timelines: At least one.
        width: Characters of the longest step; fewer where the terminal is narrower.
        headings: One for each timeline (default: whether it was predicted or measured).
    """
    headings = headings or [timeline.origin.capitalize() for timeline in timelines]
    # One scale for all, so that lengths can be compared.
    longest = max(max((s.end_ns for s in t.frames), default=t.step_ns) for t in timelines) or 1
    parts: list[RenderableType] = []
    used: dict[str, str] = {}
    for timeline, heading in zip(timelines, headings, strict=True):
        steps = len(timeline.steps_ns)
        line = units.nanoseconds(timeline.step_ns) + (
            f", median of {steps} steps" if steps > 1 else ""
        )
        parts.append(title(heading, line))
        for lane in LANES:
            frames = timeline.lane(lane)
            if frames:
                # The legend has the letters that are there, and no others.
                used.update({kind(span.name): _word(span.name) for span in frames})
                parts.append(FittedBand(f"{lane:>14} ", partial(_lane, frames, longest), width))
    legend = ", ".join(f"{_LOOKS[name][0]} {used[name]}" for name in _LOOKS if name in used)
    parts.append(Text(f"{'':>14} {legend}", style="dim"))
    return Group(*parts)


def memory_text(timeline: Timeline) -> RenderableType:
    """The peak of a worker's memory, and what it is held for, of a predicted timeline."""
    sizes = [timeline.counters.get(f"peak_{category}_bytes") for category in PEAK_CATEGORIES]
    parts = ", ".join(
        f"{words} {'not measured' if size is None else units.num_bytes(round(size))}"
        for words, size in zip(_HELD_FOR, sizes, strict=True)
    )
    peak = units.num_bytes(round(timeline.counters["peak_memory_bytes"]))
    return Text(f"Memory peak of a worker {peak}: {parts}")


def verdict_text(verdict: Verdict) -> RenderableType:
    """The verdict with its waterfall, frames and notes, in a box."""
    return Panel(Text(verdict.text), box=box.ROUNDED, expand=False)


def waterfall_text(verdict: Verdict) -> RenderableType:
    """The parts of the step from the physical limit on, as floating bars that add up."""
    share = ""
    if verdict.share_of_ceiling is not None:
        share = f"{units.percent(verdict.share_of_ceiling)} of the step is the physical limit"
    return Group(title("Where the step goes", share), Text("\n".join(waterfall_lines(verdict))))


def _word(name: str) -> str:
    """A frame's kind in the legend."""
    algorithm = algorithm_of(name)
    return kind(name).replace("_", " ") if algorithm is None else algorithm.label


def _lane(frames: Sequence[Span], longest_ns: int, width: int) -> Text:
    """One row of characters; where several frames share a character the longest shows."""
    cells: list[tuple[float, str]] = [(0.0, "")] * width
    scale = width / longest_ns
    for span in frames:
        start, end = span.start_ns * scale, span.end_ns * scale
        # One character at least, or a short frame would not be seen.
        for index in range(int(start), min(width, max(int(start) + 1, int(-(-end // 1))))):
            covered = min(end, index + 1) - max(start, index)
            if covered > cells[index][0]:
                cells[index] = (covered, kind(span.name))
    row = Text()
    for _, name in cells:
        letter, style = _LOOKS.get(name, (".", "dim"))
        row.append(letter, style=style)
    return row
