"""Sections of the report about the step: timelines, roofline, memory, and time per frame."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline import units
from ridgeline.machine import Machine, Setting
from ridgeline.reporting.charts.chart_roofline import placed, roofline_figure, roofs
from ridgeline.reporting.charts.chart_timeline import MOST_DETAILS, frame_colour, timeline_figure
from ridgeline.reporting.charts.charts import memory_figure
from ridgeline.reporting.operators import OpGroup, operators_grid, seconds_by
from ridgeline.reporting.page.html import Content, Markup, join, table, tag
from ridgeline.reporting.page.sections import chart, grid_box, legend, section, swatch
from ridgeline.simulator.workspaces import workspace_bytes
from ridgeline.timeline import LANES, Timeline
from ridgeline.verdict.verify import compare_frames
from ridgeline.workload import Workload


def timeline_section(
    predicted: Timeline | None, measured: Timeline | None, word: str = "predicted"
) -> Markup | None:
    """Both timelines on one axis; None when there is neither. A corrected prediction is `expected`."""
    timelines = [timeline for timeline in (predicted, measured) if timeline is not None]
    if not timelines:
        return None
    figure = timeline_figure(timelines, word)
    keys = tag(
        "p",
        Markup(
            "Drag to zoom, double-click to reset. With the keyboard: <kbd>Tab</kbd> to the chart, "
            "<kbd>A</kbd> <kbd>D</kbd> move, <kbd>W</kbd> <kbd>S</kbd> zoom, <kbd>0</kbd> resets."
        ),
        class_="keys",
    )
    return section(
        "timeline",
        "Timeline of one step",
        # The measured one, where there is one.
        timeline_reading(timelines[-1]),
        chart("timeline", figure, "Timeline of one step", has_keys=True),
        _left_out(timelines),
        legend([(trace["name"], trace["marker"]["color"]) for trace in figure["data"]]),
        keys,
        frame_table(timelines[-1]),
    )


def timeline_reading(timeline: Timeline) -> str:
    """One sentence on how computing and communicating share the step."""
    step = timeline.step_ns
    busy, talking = timeline.busy_ns("compute"), timeline.busy_ns("communication")
    exposed = timeline.total_ns("wait")
    word = "takes" if timeline.origin == "measured" else "is predicted to take"
    text = f"The step {word} {units.nanoseconds(step)}"
    if talking:
        if exposed > talking:
            # Medians of different steps, or workers and other programs that hold up its end.
            return (
                f"{text}; nothing of {units.nanoseconds(talking)} of communication hides behind computing, "
                f"and the step waits {units.nanoseconds(exposed - talking)} longer than that."
            )
        hidden = 1 - exposed / talking
        return (
            f"{text}; of {units.nanoseconds(talking)} of communication {units.percent(hidden)} hides "
            f"behind computing and {units.nanoseconds(exposed)} is exposed."
        )
    share = (busy - exposed) / step if step else 0.0
    return f"{text}; the compute lane is busy for {units.percent(share)} of it, nothing is communicated."


def frame_table(timeline: Timeline) -> Markup:
    """The frames of a timeline as text, for screen readers, paper and copying."""
    rows: list[tuple[Content, ...]] = [
        (
            span.name,
            span.lane,
            units.nanoseconds(span.start_ns),
            units.nanoseconds(span.duration_ns),
        )
        for span in timeline.frames
    ]
    title = f"The {timeline.origin} frames as a table"
    return tag(
        "details",
        tag("summary", title),
        table(("Frame", "Lane", "Start", "Duration"), rows, caption=title, numeric=(2, 3)),
    )


def roofline_section(
    machine: Machine | None, setting: Setting | None, groups: Sequence[OpGroup]
) -> Markup | None:
    """The roofline with the operators of the step; None without ceilings, times or FLOP."""
    if machine is None or setting is None or not placed(groups):
        return None
    if not roofs(machine, setting)[0]:
        return None
    return section(
        "roofline",
        "Roofline",
        roofline_reading(machine, setting, groups),
        chart("roofline", roofline_figure(machine, setting, groups), "Roofline of the operators"),
        grid_box(operators_grid(groups, "Operators that take the longest")),
    )


def roofline_reading(machine: Machine, setting: Setting, groups: Sequence[OpGroup]) -> str:
    """One sentence on which side of the ridge the time is spent."""
    compute, memory = roofs(machine, setting)
    total = sum(group.seconds for group in groups)
    by_bound = seconds_by(groups, "bound")
    bound, most = next(iter(by_bound.items()))
    unplaced = total - sum(group.seconds for group in placed(groups))
    ridge = ""
    if memory is not None:
        # Of a dtype that the step uses, and not of the fastest that the machine has.
        used = {group.dtype for group in placed(groups)}
        top = next((ceiling for ceiling in compute if ceiling.dtype in used), compute[0])
        value = top.rate.value / memory.rate.value
        ridge = (
            f"In {top.dtype} the processor limits above {units.digits3(value)} FLOP per byte, "
            "below it memory does. "
        )
    share = share_of_roof(machine, setting, groups)
    reached = units.percent(share)
    text = (
        f"{ridge}{units.percent(most / total)} of the operator time is bound by {bound or 'unknown'}, "
        f"and what has a dot runs at {reached} of the roof above it"
    )
    if share > 1.0:
        text += ", so the roof is too low (caches are faster than memory, or the machine was busy)"
    if unplaced > 0.005 * total:
        text += f"; {units.percent(unplaced / total)} is in operators that compute nothing and have no dot"
    return f"{text}."


def share_of_roof(machine: Machine, setting: Setting, groups: Sequence[OpGroup]) -> float:
    """Mean over the time of how much of the roof above it each group reaches.

    The roof of a group is the lower of the highest ceiling of its dtype and its intensity times the
    memory ceiling.

    Source: Williams, Waterman, Patterson 2009, with measured ceilings.
    """
    compute, memory = roofs(machine, setting)
    weighted = total = 0.0
    for group in placed(groups):
        tops = [c.rate.value for c in compute if c.dtype == group.dtype]
        # What has no ceiling of its own dtype is held against the highest.
        tops = tops or [compute[0].rate.value]
        roof = max(tops)
        if memory is not None:
            roof = min(roof, group.intensity * memory.rate.value)
        weighted += group.seconds * group.rate / roof
        total += group.seconds
    return weighted / total if total else 0.0


def memory_section(
    workload: Workload | None,
    machine: Machine | None,
    setting: Setting | None,
    predicted: Timeline | None = None,
) -> Markup | None:
    """Live bytes over the traced step, and the predicted peak; None without a workload that knows them."""
    if workload is None or not workload.memory:
        return None
    capacity = capacity_bytes(workload, machine)
    workspaces: tuple[int, ...] = ()
    if machine is not None and setting is not None:
        workspaces = workspace_bytes(machine, workload, setting)
    return section(
        "memory",
        "Memory over the step",
        memory_reading(workload, capacity, workspaces, predicted),
        chart(
            "memory",
            memory_figure(workload, capacity, workspaces),
            "Live memory over the step by category",
        ),
    )


def capacity_bytes(workload: Workload, machine: Machine | None) -> int:
    """Memory of one device of the workload's kind; 0 when the machine does not say."""
    devices = machine.devices if machine is not None else ()
    sizes = [device.memory_bytes for device in devices if device.kind == workload.device]
    # The smallest, since every worker holds as much.
    return min(sizes, default=0)


def memory_reading(
    workload: Workload,
    capacity: int,
    workspaces: Sequence[int] = (),
    predicted: Timeline | None = None,
) -> str:
    """One sentence on the peak, what it is made of, and how far the limit is."""
    # Where workspaces are not known, the peak is that of the tensors alone.
    spaces = workspaces or [0] * len(workload.ops)
    peak = max(workload.memory, key=lambda point: point.total_bytes + spaces[point.op])
    total = peak.total_bytes + spaces[peak.op]
    parts = {
        "activations": peak.activation_bytes,
        "parameters": peak.parameter_bytes,
        "gradients": peak.gradient_bytes,
        "optimizer state": peak.state_bytes,
        "workspaces of operators": spaces[peak.op],
    }
    name, most = max(parts.items(), key=lambda item: item[1])
    phase = workload.ops[peak.op].phase if peak.op < len(workload.ops) else "step"
    text = (
        f"Live tensors {'and workspaces ' if workspaces else ''}of one worker peak at "
        f"{units.num_bytes(total)} in the {phase}, {units.percent(most / max(1, total))} of it {name}"
    )
    if capacity:
        text += f"; that is {units.percent(total / capacity)} of {units.num_bytes(capacity)}"
    planned = 0.0 if predicted is None else predicted.counters.get("peak_memory_bytes", 0.0)
    # The trace is of a worker alone; a plan may keep gradients in buckets, or divide batches and states.
    if planned and units.num_bytes(planned) != units.num_bytes(total):
        text += f". By its plan a worker holds {units.num_bytes(planned)} at most"
    return f"{text}. What the allocator adds is not included."


class FrameTimes(NamedTuple):
    """A frame that was both predicted and measured."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def change_s(self) -> float:
        """How much longer it took than predicted."""
        return self.measured_s - self.predicted_s


def frames_section(
    predicted: Timeline | None,
    measured: Timeline | None,
    tolerance: float,
    word: str = "predicted",
) -> Markup | None:
    """Predicted, or expected, against measured, frame by frame; None unless both timelines are there."""
    if predicted is None or measured is None:
        return None
    # What only one side has cannot be compared; the verdict lists it.
    frames = [
        FrameTimes(frame.name, frame.predicted_ns * 1e-9, frame.measured_ns * 1e-9)
        # From the host outwards, as the timeline draws them.
        for frame in sorted(compare_frames(predicted, measured), key=lambda f: LANES.index(f.lane))
        if frame.predicted_ns is not None and frame.measured_ns is not None
    ]
    if not frames:
        return None
    step_s = measured.step_ns * 1e-9
    rows = [
        (
            join((swatch(frame_colour(frame.name)), frame.name)),
            units.seconds(frame.predicted_s),
            units.seconds(frame.measured_s),
            _change(frame.change_s, step_s),
        )
        for frame in frames
    ]
    head = ("Frame", word.capitalize(), "Measured", "Difference")
    return section(
        "frames",
        "Where the time went",
        frames_reading(frames, step_s, tolerance, word),
        table(head, rows, caption=f"{head[1]} and measured time by frame", numeric=(1, 2, 3)),
    )


def frames_reading(
    frames: Sequence[FrameTimes], step_s: float, tolerance: float, word: str = "predicted"
) -> str:
    """One sentence on how many frames were predicted well, and which one costs most."""
    # Of the measured time, as the verdict has it; a frame of no time must be predicted as none.
    good = sum(abs(one.change_s) <= tolerance * max(one.measured_s, 1e-12) for one in frames)
    worst = max(frames, key=lambda one: abs(one.change_s))
    size_s = abs(worst.change_s)
    direction = "longer" if worst.change_s > 0 else "shorter"
    share = f" ({units.percent(size_s / step_s)} of the step)" if step_s else ""
    return (
        f"{good} of {len(frames)} frames are within {units.percent(tolerance)} of what was {word}; the "
        f"largest difference is in {worst.name}, {units.seconds(size_s)} {direction} than {word}{share}."
    )


def _change(change_s: float, step_s: float) -> Markup:
    # What is below one part in two hundred of the step does not deserve a colour.
    tone = None if abs(change_s) < 0.005 * step_s else "over" if change_s > 0 else "under"
    sign = "+" if change_s > 0 else "-" if change_s < 0 else ""
    return tag("span", f"{sign}{units.seconds(abs(change_s))}", class_=tone)


def _left_out(timelines: Sequence[Timeline]) -> Markup | None:
    """What the drawing does not show, if anything."""
    # By index as well, as several lanes of a kind are drawn each for itself.
    lanes = [
        Counter((span.lane, span.index) for span in timeline.spans if span.detail)
        for timeline in timelines
    ]
    hidden = sum(max(0, count - MOST_DETAILS) for found in lanes for count in found.values())
    if not hidden:
        return None
    return tag("p", f"{hidden} of the shortest operators are not drawn.", class_="quiet small")
