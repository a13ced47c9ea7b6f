"""Figures of curves by size: collectives, copies, and operators that are too small for the hardware."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline import units
from ridgeline.machine import Machine, Setting
from ridgeline.reporting.charts.figure import FINE, LOG, Figure, axis, layout, line
from ridgeline.reporting.links import links_by_kind

_SERIES = ("@forward", "@communication", "@normalization", "@attention", "@wait", "@memory-copy")
_DASHES = ("solid", "dash", "dot", "dashdot")


class CurveDot(NamedTuple):
    """A point of a curve, and what is said of it."""

    x: float
    y: float
    text: str


Curves = Mapping[str, Sequence[CurveDot]]
"""Name to points, by what is on the x axis."""


def collectives_figure(machine: Machine) -> Figure:
    """Payload per second of each measured collective by message size."""
    curves = {
        f"{entry.operation} ({entry.backend}, {entry.setting.workers})": [
            rate_dot(point.num_bytes, point.seconds.value) for point in entry.table
        ]
        for entry in machine.collectives
    }
    return curves_figure(curves, axis("message size", **LOG), axis("bytes/s", **LOG))


def links_figure(machine: Machine) -> Figure:
    """Bytes per second between host and GPU, and between GPUs, by copy size."""
    curves = {
        kind: [rate_dot(size, seconds) for size, seconds in table.items()]
        for kind, table in links_by_kind(machine).items()
    }
    return curves_figure(curves, axis("copy size", **LOG), axis("bytes/s", **LOG))


def efficiency_figure(machine: Machine, setting: Setting, unit: str) -> Figure:
    """Rate by operation size of the ceilings of one setting that are given in `unit`."""
    work = unit.partition("/")[0]
    curves = {
        f"{ceiling.family} {ceiling.dtype}": [
            rate_dot(point.work, point.work / point.rate, work)
            for point in ceiling.curve
            # Logarithmic axes have no place for 0.
            if point.rate > 0
        ]
        for ceiling in machine.ceilings
        if ceiling.setting == setting and ceiling.curve and ceiling.rate.unit == unit
    }
    x = axis(f"work per operation, {work}", **LOG)
    return curves_figure(curves, x, axis(unit, **LOG), in_bytes=work == "B")


FEW_DECADES = 100.0
"""Between the least and the largest value: fewer ticks than two say nothing of the values between."""


def rate_dot(size: float, seconds: float, unit: str = "B", moved: float = 1.0) -> CurveDot:
    """The rate at a size: `moved` times the size, of this unit, in so many seconds."""
    rate = moved * size / seconds
    words = units.num_bytes(size) if unit == "B" else units.quantity(size, unit)
    told = f"{words}: {units.quantity(rate, f'{unit}/s')}, {units.seconds(seconds)}"
    return CurveDot(size, rate, told)


def curves_figure(
    curves: Curves, x: dict[str, Any], y: dict[str, Any], *, in_bytes: bool = True
) -> Figure:
    """Curves with dots that tell their text.

    Args:
        curves: By what stands on the x axis.
        x: That axis.
        y: The other.
        in_bytes: Whether x is in bytes, whose ticks are powers of two.
    """
    data = [
        line(
            [dot.x for dot in dots],
            [dot.y for dot in dots],
            _SERIES[index % len(_SERIES)],
            name=name,
            mode="lines+markers",
            line={
                "color": _SERIES[index % len(_SERIES)],
                "width": 2,
                # Colours come again after some curves, and then with another dash.
                "dash": _DASHES[index // len(_SERIES) % len(_DASHES)],
            },
            marker={"size": 5},
            text=[dot.text for dot in dots],
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
        for index, (name, dots) in enumerate(curves.items())
    ]
    sizes = [dot.x for dots in curves.values() for dot in dots]
    ticks = _byte_ticks(min(sizes), max(sizes)) if in_bytes and sizes else {}
    margin = {"l": 8, "r": 12, "t": 12, "b": 46}
    scale = fine_ticks([dot.y for dots in curves.values() for dot in dots])
    return {
        "data": data,
        "layout": layout(320, xaxis=x | ticks, yaxis=y | scale, showlegend=True, margin=margin),
    }


def fine_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Settings of a logarithmic axis: ticks at 1, 2 and 5 where decades alone would be one or two."""
    shown = [value for value in values if value > 0]
    return FINE if shown and max(shown) < FEW_DECADES * min(shown) else {}


def _byte_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks at powers of two that people know, a factor of 32 apart."""
    powers = [power for power in range(0, 50, 5) if low <= 1 << power <= high]
    return {
        "tickmode": "array",
        "tickvals": [1 << power for power in powers],
        "ticktext": [units.num_bytes(1 << power).replace(".00", "") for power in powers],
    }
