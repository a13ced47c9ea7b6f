"""Figures of where data lies: the staircase of memory, and what each pair of devices copies."""

import math

from ridgeline import units
from ridgeline.machine import Machine
from ridgeline.reporting.charts.chart_rates import CurveDot, curves_figure
from ridgeline.reporting.charts.figure import LOG, Figure, axis, layout, note, rule
from ridgeline.reporting.links import LinkMatrix

_ACCESSES = {
    "access_s": "a load that waits for the one before",
    "line_s": "a word of each line, in order",
    "word_s": "each word, in order",
}


def staircase_figure(machine: Machine) -> Figure:
    """Seconds of an access by the bytes walked through, with the ends of the caches; needs stairs."""
    curves = {
        name: [
            latency_dot(stair.num_bytes, getattr(stair, field).value) for stair in machine.stairs
        ]
        for field, name in _ACCESSES.items()
    }
    figure = curves_figure(curves, axis("bytes walked through", type="log"), axis("seconds", **LOG))
    first, last = machine.stairs[0].num_bytes, machine.stairs[-1].num_bytes
    # An end that was not walked across would have no step beside it.
    reached = {name: size for name, size in machine.caches.items() if first < size < last}
    lowest, highest = (end(dot.y for dots in curves.values() for dot in dots) for end in (min, max))
    # Words stand below the curves.
    figure["layout"]["yaxis"]["range"] = [math.log10(lowest) - 0.4, math.log10(highest) + 0.1]
    figure["layout"] |= {
        "shapes": [rule("x", size, "@line", dash="dash") for size in reached.values()],
        "annotations": [
            # On a logarithmic axis Plotly places lines by values, but words by logarithms.
            {**note(f"{name} ends", x=math.log10(size), y=0), "yref": "paper"}
            for name, size in reached.items()
        ],
    }
    return figure


def latency_dot(num_bytes: int, seconds: float) -> CurveDot:
    """What an access takes where so many bytes are used."""
    return CurveDot(num_bytes, seconds, f"{units.num_bytes(num_bytes)}: {units.seconds(seconds)}")


def link_matrix_figure(matrix: LinkMatrix) -> Figure:
    """Bytes per second from each device to each other one at the largest size measured."""
    names, rows = list(matrix.names), [list(row) for row in matrix.rows]
    return {
        "data": [
            {
                "type": "heatmap",
                "x": names,
                "y": names,
                "z": rows,
                "text": [
                    ["" if rate is None else units.quantity(rate, "B/s") for rate in row]
                    for row in rows
                ],
                "texttemplate": "%{text}",
                "hovertemplate": "%{y} to %{x}: %{text}<extra></extra>",
                # Colours of the palette, which has them for both themes.
                "colorscale": [[0, "@backward"], [1, "@forward"]],
                "showscale": False,
                "xgap": 2,
                "ygap": 2,
            }
        ],
        "layout": layout(
            max(240, 60 + 44 * len(names)),
            xaxis=axis("to", showgrid=False, type="category", dtick=1),
            # Plotly counts rows upwards, and a matrix is read from the top.
            yaxis=axis("from", showgrid=False, type="category", dtick=1, autorange="reversed"),
            margin={"l": 8, "r": 12, "t": 12, "b": 46},
        ),
    }
