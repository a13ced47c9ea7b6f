"""Figure of a predicted scaling curve: its band, laws through it, other machines, and efficiency."""

from collections.abc import Sequence
from typing import Any

from ridgeline.reporting.charts.chart_scaling import (
    dots,
    grid_of,
    law_curve,
    no_loss,
    scaling_layout,
)
from ridgeline.reporting.charts.figure import Figure, axis, layout, line, plain
from ridgeline.simulator.curves.scaling import ScalingPoint
from ridgeline.verdict.predicted_scaling import WORTH_WHILE, PredictedScaling

BAND = "predicted, 90 %"
"""Name of the band."""
EFFICIENCY = "efficiency (right)"
_COLOUR = "@communication"
_OTHERS = ("@copy", "@attention", "@wait")
"""Colours of curves on other machines, in turn."""


def predicted_scaling_figure(scaling: PredictedScaling) -> Figure:
    """Speed by number of workers, both in powers, on the left axis; efficiency on the right one."""
    points = scaling.points
    counts = [point.workers for point in points]
    grid = grid_of(counts)
    # Later traces cover earlier ones, so that the prediction itself comes behind bands and laws.
    shown = [
        no_loss(points[0].samples_per_s / points[0].speedup if points[0].speedup else 0.0, grid),
        *_band(points),
        *(law_curve(law, grid) for law in scaling.laws),
        *(
            _curve(other.points, plain(other.question), _OTHERS[number % len(_OTHERS)])
            for number, other in enumerate(scaling.others)
        ),
        _predicted(points),
        _worth_while(counts),
        _efficiency(points),
    ]
    # Workers that gain a cache each do more than all of their work, and must stay in the picture.
    most = max(1.0, *(point.efficiency for point in points))
    right = axis(
        "efficiency",
        overlaying="y",
        side="right",
        range=[0.0, 1.05 * most],
        tickformat=".0%",
        # Else it has as many ticks as the left axis, at any values.
        tickvals=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
        # The grid is the left axis's: lines of a second one would fall between those.
        showgrid=False,
    )
    return {
        "data": shown,
        "layout": scaling_layout(
            counts,
            420,
            yaxis2=right,
            hovermode="closest",
            legend=layout(0)["legend"] | {"y": -0.2, "yanchor": "top"},
            margin={"l": 8, "r": 12, "t": 12, "b": 110},
        ),
    }


def _band(points: Sequence[ScalingPoint]) -> list[dict[str, Any]]:
    """What nine in ten drawn machines do; nothing where none were drawn."""
    ends = [
        (point.workers, point.samples_per_s * point.step_s, point.low_s, point.high_s)
        for point in points
    ]
    known = [(n, whole, low, high) for n, whole, low, high in ends if low and high]
    if not known:
        return []
    counts = [n for n, _, _, _ in known]
    style = {"width": 0, "color": _COLOUR}
    # Rates are inverse to times, so that the long end of a step is the low end of the band.
    slow = [whole / high for _, whole, _, high in known]
    fast = [whole / low for _, whole, low, _ in known]
    # `tonexty` fills up to the trace before, so that the order of both counts.
    return [
        line(counts, slow, _COLOUR, line=style, hoverinfo="skip", showlegend=False),
        line(counts, fast, _COLOUR, line=style, hoverinfo="skip", name=BAND,
             fill="tonexty", fillcolor="@bad-wash"),
    ]  # fmt: skip


def _predicted(points: Sequence[ScalingPoint]) -> dict[str, Any]:
    drawn = dots(
        [point.workers for point in points],
        [point.samples_per_s for point in points],
        [],
        [],
        {"color": _COLOUR, "size": 9, "symbol": "diamond"},
        "predicted",
    )
    return drawn | {"mode": "lines+markers", "line": {"color": _COLOUR, "width": 2}}


def _curve(points: Sequence[ScalingPoint], name: str, colour: str) -> dict[str, Any]:
    counts, rates = [p.workers for p in points], [p.samples_per_s for p in points]
    style = {"color": colour, "width": 2, "dash": "dot"}
    return line(
        counts, rates, colour, name=name, line=style, hovertemplate="%{y:.3~s} samples/s"
    )  # the name stands beside it


def _efficiency(points: Sequence[ScalingPoint]) -> dict[str, Any]:
    return line(
        [point.workers for point in points],
        [point.efficiency for point in points],
        "@faint",
        mode="lines+markers",
        name=EFFICIENCY,
        yaxis="y2",
        line={"color": "@soft", "width": 1, "dash": "dashdot"},
        marker={"color": "@soft", "size": 5},
        hovertemplate="%{x} workers: %{y:.1%}<extra></extra>",
    )


def _worth_while(counts: Sequence[int]) -> dict[str, Any]:
    """Where efficiency is said to fall off."""
    style = {"color": "@line", "width": 1}
    ends, level = [counts[0], counts[-1]], [WORTH_WHILE, WORTH_WHILE]
    return line(ends, level, "@line", yaxis="y2", line=style, hoverinfo="skip", showlegend=False)
