"""The figure with both timelines on one time axis: predicted above measured, lanes as rows."""

from collections.abc import Sequence
from typing import Any

from ridgeline import units
from ridgeline.reporting.charts.figure import Figure, axis, layout, plain
from ridgeline.reporting.trace_json import rows
from ridgeline.synchronisation import algorithm_of, is_bucket_frame
from ridgeline.timeline import LANES, Span, Timeline, lane_title

MOST_DETAILS = 1500
"""Operators drawn per timeline, longest first: more cannot be distinguished, and drawing takes seconds."""

KINDS = {
    "input": ("Input", "@input"),
    "step": ("Whole step as one program", "@forward"),
    "forward": ("Forward", "@forward"),
    "backward": ("Backward", "@backward"),
    "wait": ("Exposed communication", "@wait"),
    "optimizer": ("Optimizer", "@optimizer"),
    "bucket": ("Gradients", "@communication"),
    "all_gather": ("Updated parameters", "@communication"),
    "broadcast_buffers": ("Buffers", "@copy"),
    "other": ("Other", "@other"),
}
_BOUNDS = {
    "compute": ("Operator, compute-bound", "@matmul"),
    "memory": ("Operator, memory-bound", "@normalization"),
    "other": ("Operator, bound otherwise", "@memory-copy"),
}
_ROW_HEIGHT = 34


def kind(name: str) -> str:
    """The key of `KINDS` that a frame of this name belongs to."""
    if is_bucket_frame(name):
        return "bucket"
    head = name.partition("/")[0]
    # Micro-batches but the last have forward and backward in one frame.
    return {"micro": "forward"}.get(head, head if head in KINDS else "other")


def kind_title(name: str) -> str:
    """What frames of this name's kind are called; those of buckets by their algorithm."""
    algorithm = algorithm_of(name)
    if algorithm is None:
        return KINDS[kind(name)][0]
    return algorithm.label[:1].upper() + algorithm.label[1:]


def frame_colour(name: str) -> str:
    """The palette name of a frame's colour, the same in every figure and table."""
    return KINDS[kind(name)][1]


def timeline_figure(timelines: Sequence[Timeline], word: str = "predicted") -> Figure:
    """One figure of one or two timelines, the first on top.

    Args:
        timelines: Predicted and measured, in the order from top to bottom; at least one.
        word: What the predicted one is called.
    """
    longest_ns = max(max((s.end_ns for s in t.spans), default=t.step_ns) for t in timelines)
    # From 2 ms on in ms: numbers of five digits leave no room between ticks.
    scale, unit = (1e6, "ms") if longest_ns >= 2_000_000 else (1e3, "us")
    drawing = _Drawing(scale, unit, word)
    for timeline in timelines:
        drawing.add(timeline)
    height = _ROW_HEIGHT * drawing.height + 60
    end = longest_ns / scale
    return {
        "data": sorted(drawing.traces.values(), key=lambda trace: trace["legendrank"]),
        "layout": layout(
            round(height),
            # Each bar has a base of its own; Plotly would stack those of one row otherwise.
            barmode="overlay",
            bargap=0,
            xaxis=axis(
                f"time since the start of the step, {unit}", range=[-0.005 * end, 1.01 * end]
            ),
            yaxis=axis(
                "",
                tickmode="array",
                tickvals=list(drawing.ticks),
                ticktext=list(drawing.ticks.values()),
                # Upside down, as Plotly counts upwards and the first timeline is to be on top.
                range=[drawing.height - 0.35, -0.85],
                showgrid=False,
                fixedrange=True,
                ticklen=6,
                tickcolor="rgba(0,0,0,0)",
            ),
            hovermode="closest",
            annotations=drawing.titles,
            # Labels that do not fit in 10 pixels are left out and not made smaller.
            uniformtext={"minsize": 10, "mode": "hide"},
            margin={"l": 8, "r": 12, "t": 8, "b": 52},
        ),
    }


class _Drawing:
    """Bars collected by colour; `height` is the next free row."""

    def __init__(self, scale: float, unit: str, word: str) -> None:
        self.word = word
        self.scale = scale
        self.unit = unit
        self.height = 0.0
        self.ticks: dict[float, str] = {}
        self.titles: list[dict[str, Any]] = []
        self.traces: dict[tuple[bool, str], dict[str, Any]] = {}

    def add(self, timeline: Timeline) -> None:
        """Draw the lanes of one timeline below what is there."""
        if self.height:
            # Or the title of the second would be taken for a lane of the first.
            self.height += 0.45
        steps = len(timeline.steps_ns)
        word = self.word if timeline.origin == "predicted" else timeline.origin
        what = f"<b>{word.capitalize()}</b>   {units.nanoseconds(timeline.step_ns)}"
        if timeline.origin == "measured":
            what += f", median of {steps}" if steps > 1 else ", one step"
        self.titles.append(
            {
                "text": what,
                "xref": "paper",
                "x": 0,
                "xanchor": "left",
                "y": self.height - 0.12,
                "yanchor": "middle",
                "showarrow": False,
                "font": {"size": 13, "color": "@ink"},
            }
        )
        self.height += 0.8
        for lane in LANES:
            indexes = timeline.indexes(lane)
            for index in indexes:
                spans = [s for s in timeline.spans if s.lane == lane and s.index == index]
                title = lane_title(lane, index, indexes)
                self._lane(title, [s for s in spans if not s.detail], 0.66)
                details = [s for s in spans if s.detail]
                # By start as well, so that equal timelines give equal pages.
                longest = sorted(details, key=lambda s: (-s.duration_ns, s.start_ns))[:MOST_DETAILS]
                self._lane("operators" if title == "compute" else f"{title} ops", longest, 0.4)

    def _lane(self, name: str, spans: Sequence[Span], thickness: float) -> None:
        for index, row in enumerate(rows(spans)):
            # A lane of several rows has its name at the first.
            self.ticks[self.height] = "" if index else name
            for span in row:
                self._bar(span, thickness)
            self.height += 1.0 if thickness > 0.5 else 0.72

    def _bar(self, span: Span, thickness: float) -> None:
        # Operators are coloured by what bounds them, frames by what they are.
        if span.detail:
            bound = str(span.attributes.get("bound", "other"))
            group = bound if bound in _BOUNDS else "other"
            name, shade = _BOUNDS[group]
            rank = len(KINDS) + list(_BOUNDS).index(group)
        else:
            name, shade = kind_title(span.name), frame_colour(span.name)
            rank = list(KINDS).index(kind(span.name))
        # One trace a colour and not one a bar, of which Plotly draws hundreds slowly.
        trace = self.traces.setdefault((span.detail, name), _trace(name, shade, rank, span.detail))
        trace["y"].append(self.height)
        trace["base"].append(span.start_ns / self.scale)
        trace["x"].append(span.duration_ns / self.scale)
        trace["width"].append(thickness)
        trace["text"].append("" if span.detail else _short(span.name))
        trace["customdata"].append(hover(span))


def _trace(name: str, shade: str, rank: int, is_detail: bool) -> dict[str, Any]:
    """An empty bar trace of one colour."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "legendrank": rank,
        "x": [],
        "y": [],
        "base": [],
        "width": [],
        "text": [],
        "customdata": [],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"size": 11, "color": "@ink" if is_detail else f"@on-{shade[1:]}"},
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {"color": shade, "line": {"width": 0 if is_detail else 1, "color": "@card"}},
    }


def hover(span: Span) -> str:
    """What is known about a span, one fact a line."""
    known = span.attributes
    lines = [
        f"<b>{plain(span.name)}</b>",
        f"{units.nanoseconds(span.duration_ns)}, from {units.nanoseconds(span.start_ns)}",
    ]
    if known.get("module"):
        lines.append(plain(str(known["module"])))
    for key, unit in (("flops", "FLOP"), ("bytes", "B")):
        value = known.get(key)
        if isinstance(value, int | float) and value:
            lines.append(units.quantity(value, unit))
    if known.get("bound"):
        source = f" ({plain(str(known['source']))})" if known.get("source") else ""
        lines.append(f"bound by {plain(str(known['bound']))}{source}")
    return "<br>".join(lines)


def _short(name: str) -> str:
    """The label inside a bar: bucket 3 is 3 on its lane, and so is `backward/3`; the rest keep their word."""
    head, _, number = name.partition("/")
    is_numbered = is_bucket_frame(name) or (number and head == "backward")
    return number if is_numbered else plain(head)
