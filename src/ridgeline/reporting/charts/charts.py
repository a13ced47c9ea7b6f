"""Figures of a run: memory over the step, and training curves."""

from collections.abc import Sequence
from typing import Any

from ridgeline import units
from ridgeline.history import History
from ridgeline.reporting.charts.figure import Figure, axis, layout, line, note, rule
from ridgeline.workload import Workload

MEMORY_CATEGORIES = (
    # From what stays all the time up to what comes and goes, as they are stacked.
    ("parameter_bytes", "Parameters", "@parameter"),
    ("state_bytes", "Optimizer state", "@state"),
    ("gradient_bytes", "Gradients", "@gradient"),
    ("activation_bytes", "Activations", "@activation"),
)


def memory_figure(
    workload: Workload, capacity_bytes: int, workspaces: Sequence[int] = ()
) -> Figure:
    """Live bytes over the ops of the step, stacked by category; the capacity as a line if in reach.

    Args:
        workload: The step.
        capacity_bytes: Of one device; 0 for none.
        workspaces: What operators take for themselves, by op; empty where that is not known.
    """
    points = workload.memory
    stacks = [
        ([getattr(point, field) for point in points], name, colour)
        for field, name, colour in MEMORY_CATEGORIES
    ]
    if workspaces:
        stacks.append(([workspaces[point.op] for point in points], "Workspaces", "@workspace"))
    peak = max((sum(each) for each in zip(*(s[0] for s in stacks), strict=True)), default=0)
    # One unit for the whole axis, that of the peak.
    scale = 1 << 30 if peak >= 1 << 30 else 1 << 20
    unit = "GiB" if scale == 1 << 30 else "MiB"
    data = [
        line(
            [point.op for point in points],
            [num_bytes / scale for num_bytes in stack],
            colour,
            name=name,
            stackgroup="live",
            # Stairs and no slopes: memory comes and goes at once.
            line={"width": 0.5, "color": colour, "shape": "hv"},
            fillcolor=colour,
            hovertemplate=f"%{{y:.3~g}} {unit}",
        )
        for stack, name, colour in stacks
    ]
    shapes, annotations = _phase_marks(workload)
    # A capacity far above the peak would press all curves to the ground.
    if peak * 3 >= capacity_bytes > 0:
        y = capacity_bytes / scale
        shapes.append(rule("y", y, "@wait", dash="dash"))
        word = f"capacity {units.num_bytes(capacity_bytes)}"
        annotations.append(note(word, x=1, y=y, xref="paper", colour="@wait"))
    return {
        "data": data,
        "layout": layout(
            300,
            xaxis=axis("operator, in order of execution", showgrid=False),
            yaxis=axis(unit, rangemode="tozero", nticks=6),
            showlegend=True,
            hovermode="x unified",
            shapes=shapes,
            annotations=annotations,
            margin={"l": 8, "r": 12, "t": 40, "b": 40},
        ),
    }


def training_figures(history: History) -> list[tuple[str, Figure]]:
    """(title, figure) of loss by step, metric by epoch and samples per second by step."""
    figures: list[tuple[str, Figure]] = []
    steps = [point.step for point in history.steps]
    if steps:
        losses = [point.loss for point in history.steps]
        data = [
            line(steps, losses, "@backward", line={"color": "@backward", "width": 1.2},
                 hovertemplate="step %{x}<br>loss %{y:.4~g}<extra></extra>"),
            # Behind the raw ones, so that it is drawn above them.
            line(steps, smooth(losses), "@forward", hoverinfo="skip"),
        ]  # fmt: skip
        figures.append(("Loss by step", _small(data, "step", rangemode="tozero")))
    if history.epochs:
        data = [
            line(
                [point.epoch + 1 for point in history.epochs],
                [point.metric for point in history.epochs],
                "@normalization",
                mode="lines+markers",
                marker={"size": 7, "color": "@normalization"},
                hovertemplate="epoch %{x}<br>metric %{y:.4~g}<extra></extra>",
            )
        ]
        # Whole numbers of epochs, of which about five have a tick.
        dtick = max(1, len(history.epochs) // 5)
        figures.append(("Metric by epoch", _small(data, "epoch", dtick=dtick)))
    if steps:
        speeds = [point.samples_per_s for point in history.steps]
        data = [
            line(steps, speeds, "@optimizer", line={"color": "@optimizer", "width": 1.5},
                 hovertemplate="step %{x}<br>%{y:.3~s} samples/s<extra></extra>")
        ]  # fmt: skip
        figures.append(("Samples per second", _small(data, "step", rangemode="tozero")))
    return figures


SMOOTHING = 0.7
"""Share of the average so far in the next one: about three steps count."""


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average without the pull towards zero at its start."""
    average = total = 0.0
    result: list[float] = []
    for value in values:
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        # The weight so far, by which the average is divided: at the start it is far below 1.
        total = SMOOTHING * total + (1 - SMOOTHING)
        result.append(average / total)
    return result


def _small(data: list[dict[str, Any]], x: str, dtick: int | None = None, **y: Any) -> Figure:
    x_axis = axis(x, nticks=5, showgrid=False) | ({"dtick": dtick} if dtick else {})
    return {
        "data": data,
        "layout": layout(
            220,
            xaxis=x_axis,
            yaxis=axis("", nticks=5, **y),
            margin={"l": 8, "r": 8, "t": 8, "b": 40},
        ),
    }


def _phase_marks(workload: Workload) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A thin line and a label where each phase begins."""
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for phase in ("forward", "backward", "optimizer"):
        first = next((i for i, op in enumerate(workload.ops) if op.phase == phase), None)
        if first is None:
            continue
        # At the left edge the axis is the line.
        if first:
            shapes.append(rule("x", first, "@line", width=1))
        # A short phase has no room for its word.
        if phase != "optimizer" or len(workload.ops) - first > len(workload.ops) / 12:
            annotations.append(
                note(phase, x=first, y=1.0) | {"yref": "paper", "xshift": 4, "yanchor": "top"}
            )
    return shapes, annotations
