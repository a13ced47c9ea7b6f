"""Figure of measured scaling: the runs, what was predicted for them, and the laws through them."""

from collections.abc import Collection, Sequence
from typing import Any

from ridgeline.reporting.charts.figure import FINE, Figure, axis, layout, line
from ridgeline.verdict.scaling_nouns import Law, MeasuredScaling

_COLOURS = {"amdahl": "@forward", "gustafson": "@forward", "usl": "@optimizer"}
_STEPS = 60
"""Points of a curve."""
_MOST_TICKS = 16
"""Numbers that an axis has room for."""


def scaling_figure(scaling: MeasuredScaling) -> Figure:
    """Samples per second by number of workers, both in powers of two, with what no loss would give."""
    counts = [point.workers for point in scaling.points]
    beyond = [point.workers for law in scaling.laws for point in law.points]
    grid = grid_of(counts + beyond)
    # Measured ones last, which are then above all lines.
    data = [
        no_loss(scaling.points[0].samples_per_s / scaling.points[0].speedup, grid),
        *(law_curve(law, grid) for law in scaling.laws),
        *(_beyond(law) for law in scaling.laws if law.points),
        _predicted(scaling),
        _measured(scaling),
    ]
    return {"data": data, "layout": scaling_layout({*counts, *beyond})}


def grid_of(counts: Sequence[int]) -> list[float]:
    """Numbers of workers between the least and the most, even on a logarithmic axis."""
    first, last = min(counts), max(counts)
    return [first * (last / first) ** (number / _STEPS) for number in range(_STEPS + 1)]


def scaling_layout(counts: Collection[int], height: int = 340, **settings: Any) -> dict[str, Any]:
    """Samples per second by number of workers, on logarithmic axes; `settings` are Plotly's and win."""
    ticks = _ticks(sorted(counts))
    return layout(
        height,
        **{
            "xaxis": axis("workers", type="log", tickvals=ticks, ticktext=[str(n) for n in ticks]),
            "yaxis": axis("samples/s", **FINE),
            "showlegend": True,
        }
        | settings,
    )


def _ticks(counts: Sequence[int]) -> list[int]:
    """Those with room for their numbers on a logarithmic axis, the first and the last among them."""
    # A ratio, since equal ratios are equal distances on this axis.
    closest = (counts[-1] / counts[0]) ** (1.0 / _MOST_TICKS)
    ticks = [counts[0]]
    for count in counts[1:-1]:
        if count >= ticks[-1] * closest and counts[-1] >= count * closest:
            ticks.append(count)
    return list(dict.fromkeys((*ticks, counts[-1])))


def no_loss(base: float, grid: Sequence[float]) -> dict[str, Any]:
    """What workers would do that lose nothing; `base` is the rate of one."""
    style = {"color": "@faint", "width": 1, "dash": "dash"}
    return line(
        grid, [base * n for n in grid], "@faint", name="no loss", hoverinfo="skip", line=style
    )


def law_curve(law: Law, grid: Sequence[float]) -> dict[str, Any]:
    """What a law says of every number of workers."""
    rates = [law.throughput(workers) for workers in grid]
    return line(grid, rates, _COLOURS[law.name], name=law.name, hovertemplate="%{y:.3~s} samples/s")


def _beyond(law: Law) -> dict[str, Any]:
    """What a law says of other numbers of workers, with intervals where there are any."""
    rates = [(point.workers, point.samples_per_s) for point in law.points]
    shown = [(count, rate) for count, rate in rates if rate.value is not None]
    return dots(
        [float(count) for count, _ in shown],
        [rate.value or 0.0 for _, rate in shown],
        # An end that is infinite has no bar.
        [(rate.high or rate.value or 0.0) - (rate.value or 0.0) for _, rate in shown],
        [(rate.value or 0.0) - (rate.low or rate.value or 0.0) for _, rate in shown],
        {"color": _COLOURS[law.name], "size": 7, "symbol": "circle-open"},
        f"{law.name}, 90 %",
    )


def _measured(scaling: MeasuredScaling) -> dict[str, Any]:
    rates = [point.samples_per_s for point in scaling.points]
    samples = [point.samples_per_s * point.step_s for point in scaling.points]
    pairs = list(zip(scaling.points, rates, samples, strict=True))
    return dots(
        [float(point.workers) for point in scaling.points],
        rates,
        # Rates are inverse to times: the short end of a step is the high end of its rate.
        [whole / point.low_s - rate for point, rate, whole in pairs],
        [rate - whole / point.high_s for point, rate, whole in pairs],
        {"color": "@ink", "size": 9},
        "measured, quartiles",
    )


def _predicted(scaling: MeasuredScaling) -> dict[str, Any]:
    shown = [point for point in scaling.points if point.predicted_s]
    # A step has the same samples, whatever it takes.
    rates = [point.samples_per_s * point.step_s / (point.predicted_s or 1.0) for point in shown]
    marker = {"color": "@communication", "size": 9, "symbol": "diamond-open"}
    counts = [float(point.workers) for point in shown]
    return dots(counts, rates, [], [], marker, "predicted")


def dots(
    counts: Sequence[float],
    rates: Sequence[float],
    above: Sequence[float],
    below: Sequence[float],
    marker: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    """Rates by numbers of workers, with bars that reach so far above and below where any are given."""
    bars = {
        "type": "data",
        "symmetric": False,
        "array": list(above),
        "arrayminus": list(below),
        "color": marker["color"],
        "thickness": 1,
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(counts),
        "y": list(rates),
        "marker": marker,
        "name": name,
        "hovertemplate": "%{x} workers: %{y:.3~s} samples/s<extra></extra>",
    } | ({"error_y": bars} if above else {})
