"""The roofline: measured ceilings of one worker, and where the operators of the step stand below."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from ridgeline import units
from ridgeline.machine import Ceiling, Machine, Setting
from ridgeline.reporting.charts.figure import FINE, LOG, Figure, axis, layout, line, markers, plain
from ridgeline.reporting.operators import OpGroup

_SYMBOLS = {
    "matmul": "square",
    "convolution": "circle",
    "attention": "diamond",
    "normalization": "triangle-up",
    "elementwise": "triangle-down",
    "reduction": "pentagon",
    "gather": "hexagon",
    "copy": "cross",
}
_LARGEST = 36.0
"""Diameter in pixels of the group that takes the longest; the area of the others is in proportion."""

_ROW = 17
"""Height in pixels of a roof's name."""
_SOLID, _DOTTED, _SLOPE = "\u2500", "\u2504", "\u2571"
"""What a roof looks like, before its name."""


def roofs(machine: Machine, setting: Setting) -> tuple[list[Ceiling], Ceiling | None]:
    """The compute ceilings of a setting, highest first, and its memory ceiling if it has one."""
    mine = [ceiling for ceiling in machine.ceilings if ceiling.setting == setting]
    compute = [ceiling for ceiling in mine if ceiling.rate.unit.startswith("FLOP")]
    memory = [ceiling for ceiling in mine if ceiling.family == "memory"]
    best = max(memory, key=lambda ceiling: ceiling.rate.value, default=None)
    # Highest first, since the slope of memory ends at the highest.
    return sorted(compute, key=lambda ceiling: -ceiling.rate.value), best


def placed(groups: Sequence[OpGroup]) -> list[OpGroup]:
    """The groups that a roofline can show: those that compute, move bytes and take time."""
    return [group for group in groups if group.flops and group.num_bytes and group.seconds > 0]


def roofline_figure(machine: Machine, setting: Setting, groups: Sequence[OpGroup]) -> Figure:
    """Dots are operators grouped by key, area is time, colour and shape are the family.

    Args:
        machine: Where the ceilings come from.
        setting: Workers and threads that the ceilings and times hold for.
        groups: Operators with times; those that compute nothing are left out.
    """
    compute, memory = roofs(machine, setting)
    shown = placed(groups)
    intensities = [group.intensity for group in shown] or [1.0]
    ridge = compute[0].rate.value / memory.rate.value if compute and memory else 1.0
    # Whole decades, with some room beside the outermost dots.
    left = 10 ** math.floor(math.log10(min(*intensities, ridge) / 1.5))
    right = 10 ** math.ceil(math.log10(max(*intensities, ridge) * 1.5))
    data, names = _roof_lines(compute, memory, {group.dtype for group in shown}, left, right)
    data.extend(_dots(shown))
    rates = [group.rate for group in shown] + [ceiling.rate.value for ceiling in compute]
    # Room below the lowest dot, and above the highest roof.
    bounds = [math.log10(min(rates, default=1.0)) - 0.5, math.log10(max(rates, default=1.0)) + 0.35]
    return {
        "data": data,
        "layout": layout(
            460 + _ROW * len(names),
            xaxis=axis(
                "intensity, FLOP per byte moved", **LOG, range=[math.log10(left), math.log10(right)]
            ),
            # Ticks at 1, 2 and 5, since roofs lie within few decades.
            yaxis=axis("FLOP/s", **FINE, range=bounds),
            showlegend=True,
            # Below the plot, as the names of the roofs stand above it.
            legend=layout(0)["legend"] | {"y": -0.16, "yanchor": "top", "itemsizing": "constant"},
            annotations=[_names(names)],
            hovermode="closest",
            margin={"l": 8, "r": 12, "t": 12 + _ROW * len(names), "b": 92},
        ),
    }


def _roof_lines(
    compute: Sequence[Ceiling],
    memory: Ceiling | None,
    used: Collection[str],
    left: float,
    right: float,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Memory's slope, and ceilings from there on, dotted for dtypes that are not used; then their names."""
    data: list[dict[str, Any]] = []
    names: list[str] = []
    top = compute[0].rate.value if compute else None
    if memory is not None:
        slope = memory.rate.value
        end = top / slope if top else right
        data.append(_roof([left, end], [left * slope, end * slope], "solid"))
    for ceiling in compute:
        value = ceiling.rate.value
        # Left of its ridge point no operator reaches a ceiling, for memory limits it before.
        start = value / memory.rate.value if memory else left
        is_used = ceiling.dtype in used
        data.append(_roof([start, right], [value, value], "solid" if is_used else "dot"))
        label = f"{ceiling.family} {ceiling.dtype} {units.quantity(value, ceiling.rate.unit)}"
        names.append(f"{_SOLID if is_used else _DOTTED} {label}")
    if memory is not None:
        names.append(f"{_SLOPE} memory {units.quantity(memory.rate.value, memory.rate.unit)}")
    return data, names


def _names(rows: Sequence[str]) -> dict[str, Any]:
    """The names of the roofs, the highest first, above the plot: within it roofs and dots are in the way."""
    return {
        "text": "<br>".join(rows),
        "xref": "paper",
        "yref": "paper",
        "x": 0,
        "y": 1,
        "xanchor": "left",
        "yanchor": "bottom",
        "align": "left",
        "showarrow": False,
        "font": {"size": 12, "color": "@soft"},
    }


def _roof(x: Sequence[float], y: Sequence[float], dash: str) -> dict[str, Any]:
    style = {"width": 1.5, "color": "@soft", "dash": dash}
    return line(x, y, "@soft", showlegend=False, hoverinfo="skip", line=style)


def _dots(groups: Sequence[OpGroup]) -> list[dict[str, Any]]:
    longest = max((group.seconds for group in groups), default=1.0)
    return [
        markers(
            [group.intensity for group in mine],
            [group.rate for group in mine],
            [_hover(group) for group in mine],
            symbol=symbol(family),
            color=family_colour(family),
            # Dots of operators that are alike lie on each other.
            opacity=0.78,
            size=[max(7.0, _LARGEST * math.sqrt(group.seconds / longest)) for group in mine],
        )
        | {"name": family}
        # A trace for each family, which is an entry of the legend.
        for family in dict.fromkeys(group.family for group in groups)
        for mine in ([group for group in groups if group.family == family],)
    ]


def symbol(family: str) -> str:
    """The shape of a dot of an operator family."""
    return _SYMBOLS.get(family, "circle-open")


def family_colour(family: str) -> str:
    """The palette name of an operator family."""
    if family == "copy":
        return "@memory-copy"
    return f"@{family}" if family in _SYMBOLS or family == "view" else "@other"


def _hover(group: OpGroup) -> str:
    times = f"{group.count} x " if group.count > 1 else ""
    return (
        f"<b>{plain(group.name)}</b> ({group.phase})<br>{plain(group.where)}<br>"
        f"{times}{units.seconds(group.seconds / group.count)}, bound by {plain(group.bound) or 'unknown'}<br>"
        f"{units.quantity(group.rate, 'FLOP/s')} at {units.digits3(group.intensity)} FLOP/B"
    )
