"""Figure of measured scaling: the runs, what was predicted for them, and the laws through them."""

from typing import Any

from ridgeline.reporting.figure import Figure, axis, layout, line
from ridgeline.verdict.scaling_nouns import Law, MeasuredScaling

_COLOURS = {"amdahl": "@forward", "gustafson": "@forward", "usl": "@optimizer"}
_STEPS = 60
"""Points of a curve."""


def scaling_figure(scaling: MeasuredScaling) -> Figure:
    """Samples per second by number of workers, both in powers of two, with what no loss would give."""
    counts = [point.workers for point in scaling.points]
    beyond = [point.workers for law in scaling.laws for point in law.points]
    first, last = min(counts), max(counts + beyond)
    grid = [first * (last / first) ** (number / _STEPS) for number in range(_STEPS + 1)]
    base = scaling.points[0].samples_per_s / scaling.points[0].speedup
    data = [
        line(grid, [base * n for n in grid], "@faint", name="no loss", hoverinfo="skip",
             line={"color": "@faint", "width": 1, "dash": "dash"}),
        *(_curve(law, grid) for law in scaling.laws),
        *(_beyond(law) for law in scaling.laws if law.points),
        _predicted(scaling),
        _measured(scaling),
    ]  # fmt: skip
    ticks = sorted({*counts, *beyond})
    return {
        "data": data,
        "layout": layout(
            340,
            xaxis=axis("workers", type="log", tickvals=ticks, ticktext=[str(n) for n in ticks]),
            yaxis=axis("samples/s", type="log", tickformat=".2~s", dtick="D2"),
            showlegend=True,
        ),
    }


def _curve(law: Law, grid: list[float]) -> dict[str, Any]:
    rates = [law.throughput(workers) for workers in grid]
    return line(grid, rates, _COLOURS[law.name], name=law.name, hovertemplate="%{y:.3~s} samples/s")


def _beyond(law: Law) -> dict[str, Any]:
    """What a law says of other numbers of workers, with intervals where there are any."""
    rates = [(point.workers, point.samples_per_s) for point in law.points]
    shown = [(count, rate) for count, rate in rates if rate.value is not None]
    return _dots(
        [float(count) for count, _ in shown],
        [rate.value or 0.0 for _, rate in shown],
        [(rate.high or rate.value or 0.0) - (rate.value or 0.0) for _, rate in shown],
        [(rate.value or 0.0) - (rate.low or rate.value or 0.0) for _, rate in shown],
        {"color": _COLOURS[law.name], "size": 7, "symbol": "circle-open"},
        f"{law.name}, 90 %",
    )


def _measured(scaling: MeasuredScaling) -> dict[str, Any]:
    rates = [point.samples_per_s for point in scaling.points]
    samples = [point.samples_per_s * point.step_s for point in scaling.points]
    pairs = list(zip(scaling.points, rates, samples, strict=True))
    return _dots(
        [float(point.workers) for point in scaling.points],
        rates,
        [whole / point.low_s - rate for point, rate, whole in pairs],
        [rate - whole / point.high_s for point, rate, whole in pairs],
        {"color": "@ink", "size": 9},
        "measured, quartiles",
    )


def _predicted(scaling: MeasuredScaling) -> dict[str, Any]:
    shown = [point for point in scaling.points if point.predicted_s]
    rates = [point.samples_per_s * point.step_s / (point.predicted_s or 1.0) for point in shown]
    marker = {"color": "@communication", "size": 9, "symbol": "diamond-open"}
    counts = [float(point.workers) for point in shown]
    return _dots(counts, rates, [], [], marker, "predicted")


def _dots(
    counts: list[float],
    rates: list[float],
    above: list[float],
    below: list[float],
    marker: dict[str, Any],
    name: str,
) -> dict[str, Any]:
    bars = {
        "type": "data",
        "symmetric": False,
        "array": above,
        "arrayminus": below,
        "color": marker["color"],
        "thickness": 1,
    }
    return {
        "type": "scatter",
        "mode": "markers",
        "x": counts,
        "y": rates,
        "marker": marker,
        "name": name,
        "hovertemplate": "%{x} workers: %{y:.3~s} samples/s<extra></extra>",
    } | ({"error_y": bars} if above else {})
