"""Figures of rates by size: collectives, copies, and operators that are too small for the hardware."""

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline import units
from ridgeline.machine import Machine, Setting
from ridgeline.reporting.charts.figure import LOG, Figure, axis, layout, line
from ridgeline.reporting.links import links_by_kind

_SERIES = ("@forward", "@communication", "@normalization", "@attention", "@wait", "@memory-copy")
_DASHES = ("solid", "dash", "dot", "dashdot")


def collectives_figure(machine: Machine) -> Figure:
    """Payload per second of each measured collective by message size."""
    curves = {
        f"{entry.operation} ({entry.backend}, {entry.setting.workers})": [
            (point.num_bytes, point.num_bytes / point.seconds.value, point.seconds.value)
            for point in entry.table
        ]
        for entry in machine.collectives
    }
    return rates_figure(curves, "message size", "B", "bytes/s")


def links_figure(machine: Machine) -> Figure:
    """Bytes per second between host and GPU, and between GPUs, by copy size."""
    curves = {
        kind: [(size, size / seconds, seconds) for size, seconds in table.items()]
        for kind, table in links_by_kind(machine).items()
    }
    return rates_figure(curves, "copy size", "B", "bytes/s")


def efficiency_figure(machine: Machine, setting: Setting, unit: str) -> Figure:
    """Rate by operation size of the ceilings of one setting that are given in `unit`."""
    curves = {
        f"{ceiling.family} {ceiling.dtype}": [
            (point.work, point.rate, point.work / point.rate)
            for point in ceiling.curve
            # Logarithmic axes have no place for 0.
            if point.rate > 0
        ]
        for ceiling in machine.ceilings
        if ceiling.setting == setting and ceiling.curve and ceiling.rate.unit == unit
    }
    work = unit.partition("/")[0]
    return rates_figure(curves, f"work per operation, {work}", work, unit)


def rates_figure(
    curves: Mapping[str, Sequence[tuple[float, float, float]]], x: str, x_unit: str, y_unit: str
) -> Figure:
    """Log-log lines of (size, rate, seconds) by name; units of sizes and rates."""
    data = [
        line(
            [point[0] for point in points],
            [point[1] for point in points],
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
            text=[
                # The axis spells its unit out, which beside a number is short.
                f"{_size(point[0], x_unit)}: {units.quantity(point[1], y_unit.replace('bytes', 'B'))}"
                f", {units.seconds(point[2])}"
                for point in points
            ],
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
        for index, (name, points) in enumerate(curves.items())
    ]
    sizes = [point[0] for points in curves.values() for point in points]
    x_axis = axis(x, **LOG)
    if x_unit == "B" and sizes:
        x_axis |= byte_ticks(min(sizes), max(sizes))
    return {
        "data": data,
        "layout": layout(
            320,
            xaxis=x_axis,
            yaxis=axis(y_unit, **LOG),
            showlegend=True,
            margin={"l": 8, "r": 12, "t": 12, "b": 46},
        ),
    }


def _size(value: float, unit: str) -> str:
    return units.num_bytes(value) if unit == "B" else units.quantity(value, unit)


def byte_ticks(low: float, high: float) -> dict[str, Any]:
    """Ticks at powers of two that people know, a factor of 32 apart."""
    powers = [power for power in range(0, 50, 5) if low <= 1 << power <= high]
    return {
        "tickmode": "array",
        "tickvals": [1 << power for power in powers],
        "ticktext": [units.num_bytes(1 << power).replace(".00", "") for power in powers],
    }
