"""A step as text for the terminal: lanes over time, and the verdict with its waterfall."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ridgeline import units
from ridgeline.reporting.charts.chart_timeline import kind
from ridgeline.reporting.terminal.text import table, title, warnings
from ridgeline.simulator.memory import PEAK_CATEGORIES
from ridgeline.synchronisation import algorithm_of
from ridgeline.timeline import LANES, Span, Timeline
from ridgeline.verdict import Verdict
from ridgeline.verdict.waterfall import BETWEEN, EXPOSED, IDEAL, INPUT, KERNEL, LAUNCH, MEMORY

LANE_WIDTH = 72
BAR_WIDTH = 40
BOX_WIDTH = 96
_HELD_FOR = ("parameters", "gradients", "optimizer state", "activations", "workspaces of operators")
"""In the order of `PEAK_CATEGORIES`."""
_PART_STYLES = {
    IDEAL: "blue",
    MEMORY: "green",
    KERNEL: "cyan",
    LAUNCH: "magenta",
    EXPOSED: "red",
    INPUT: "yellow",
    BETWEEN: "bright_yellow",
}
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
        width: Characters of the longest step.
        headings: One for each timeline (default: whether it was predicted or measured).
    """
    headings = headings or [timeline.origin.capitalize() for timeline in timelines]
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
                parts.append(Text.assemble(f"{lane:>14} ", _lane(frames, longest, width)))
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
    """The box with verdict, why and next, prediction against measurement, and the waterfall."""
    reasons = Table.grid(padding=(0, 2))
    reasons.add_row(Text("Why", style="dim"), verdict.why)
    reasons.add_row(Text("Next", style="dim"), verdict.next)
    reasons.add_row(Text("Model", style="dim"), verdict.outlook)
    if verdict.replay_outlook:
        reasons.add_row(Text("Clock", style="dim"), verdict.replay_outlook)
    outcome = "within" if verdict.passed else "outside"
    comparison = Text.assemble(
        f"Measured over {verdict.num_steps} steps with a spread of {units.percent(verdict.spread)}: error ",
        (f"{100 * verdict.error:+.1f} %", "green" if verdict.passed else "red"),
        f", {outcome} the tolerance of {units.percent(verdict.tolerance)}",
    )
    lines = Group(Text(verdict.verdict, style="bold"), "", reasons, "", comparison)
    return Group(
        Panel(lines, title="Verdict", title_align="left", padding=(1, 2), width=BOX_WIDTH),
        waterfall_text(verdict),
        *warnings(verdict.notes),
    )


def waterfall_text(verdict: Verdict) -> RenderableType:
    """The parts of the step from the physical limit on, as floating bars that add up."""
    total = verdict.measured_ns or 1
    rows = table(("Part", "", "Time", "Share"), right=(2, 3))
    reached = 0
    for part in verdict.waterfall:
        # Both ends from the running sum: rounded lengths would not add up to the step.
        start = round(BAR_WIDTH * reached / total)
        reached += part.ns
        length = round(BAR_WIDTH * reached / total) - start
        rows.add_row(
            part.name,
            Text(" " * start + "\u2588" * length, style=_PART_STYLES.get(part.name, "white")),
            units.nanoseconds(part.ns),
            units.percent(part.ns / total),
        )
    rows.add_row("step", "\u2588" * BAR_WIDTH, units.nanoseconds(total), "100.0 %", style="bold")
    share = ""
    if verdict.share_of_ceiling is not None:
        share = f"{units.percent(verdict.share_of_ceiling)} of the step is the physical limit"
    return Group(title("Where the step goes", share), rows)


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
