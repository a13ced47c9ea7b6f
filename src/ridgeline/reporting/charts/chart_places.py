"""Figures of where data lies: the staircase of memory, and what each pair of devices copies."""

import math

from ridgeline import units
from ridgeline.machine import Machine
from ridgeline.reporting.charts.chart_rates import byte_ticks
from ridgeline.reporting.charts.figure import LOG, Figure, axis, layout, line, note, rule
from ridgeline.reporting.links import LinkMatrix

_SERIES = (
    ("a load that waits for the one before", "access_s", "@wait", "solid"),
    ("a word of each line, in order", "line_s", "@communication", "dash"),
    ("each word, in order", "word_s", "@forward", "dot"),
)


def staircase_figure(machine: Machine) -> Figure:
    """Seconds of an access by the bytes walked through, with the ends of the caches; needs stairs."""
    sizes = [stair.num_bytes for stair in machine.stairs]
    data = [
        line(
            sizes,
            [getattr(stair, field).value for stair in machine.stairs],
            colour,
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2, "dash": dash},
            marker={"size": 5},
            text=[
                f"{units.num_bytes(stair.num_bytes)}: {units.seconds(getattr(stair, field).value)}"
                for stair in machine.stairs
            ],
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
        for name, field, colour, dash in _SERIES
    ]
    # An end that was not walked across would have no step beside it.
    reached = {name: size for name, size in machine.caches.items() if sizes[0] < size < sizes[-1]}
    return {
        "data": data,
        "layout": layout(
            320,
            xaxis=axis("bytes walked through", type="log") | byte_ticks(sizes[0], sizes[-1]),
            yaxis=axis("seconds", **LOG),
            showlegend=True,
            shapes=[rule("x", size, "@line", dash="dash") for size in reached.values()],
            annotations=[
                # On a logarithmic axis Plotly places lines by values, but words by logarithms.
                {**note(f"{name} ends", x=math.log10(size), y=0), "yref": "paper"}
                for name, size in reached.items()
            ],
            margin={"l": 8, "r": 12, "t": 12, "b": 46},
        ),
    }


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
                "colorscale": [[0, "@backward"], [1, "@forward"]],
                "showscale": False,
                "xgap": 2,
                "ygap": 2,
            }
        ],
        "layout": layout(
            max(240, 60 + 44 * len(names)),
            xaxis=axis("to", showgrid=False, type="category"),
            # Plotly counts rows upwards, and a matrix is read from the top.
            yaxis=axis("from", showgrid=False, type="category", autorange="reversed"),
            margin={"l": 8, "r": 12, "t": 12, "b": 46},
        ),
    }
