"""Figure of layers by their intensity under data and under model parallelism."""

import math
from collections.abc import Sequence
from typing import Any

from ridgeline import units
from ridgeline.reporting.charts.chart_roofline import family_colour, symbol
from ridgeline.reporting.charts.figure import LOG, Figure, axis, layout, line, markers, note, plain
from ridgeline.reporting.labels import times
from ridgeline.reporting.layer_rows import LayerRow, kind, rows_of
from ridgeline.simulator.layers.intensity import Intensities

_LARGEST = 34.0
"""Diameter in pixels of the row with the most FLOP; the area of the others is in proportion."""
_SMALLEST = 8.0
_HEIGHT = 460


def drawn_rows(found: Intensities) -> list[LayerRow]:
    """The rows that have a place on logarithmic axes: those that compute, and send something either way."""
    return [row for row in rows_of(found) if row.one.data_intensity and row.one.model_intensity]


def intensity_figure(found: Intensities) -> Figure | None:
    """FLOP per byte under model (up) against data parallelism (right); None without any.

    Layers above the diagonal are better split by columns, layers below it by samples. Dotted lines are the
    ridge points: left of the upright one, and below the level one, the link decides.
    """
    rows = drawn_rows(found)
    if not rows:
        return None
    ends = [x for row in rows for x in (row.one.data_intensity, row.one.model_intensity) if x]
    # Layers of one dtype have one ridge point, which is drawn once.
    ridges = list(dict.fromkeys(row.one.ridge for row in rows if row.one.ridge))
    # With room on both sides, so that no dot stands on the frame.
    low, high = min(*ends, *ridges) / 2, max(*ends, *ridges) * 2
    bounds = [math.log10(low), math.log10(high)]
    equal = line([low, high], [low, high], "@faint", hoverinfo="skip", showlegend=False,
                 line={"color": "@faint", "width": 1})  # fmt: skip
    scale = LOG | {"range": bounds}
    return {
        "data": [equal, *_ridges(ridges, low, high), *_dots(rows)],
        "layout": layout(
            _HEIGHT,
            xaxis=axis("FLOP per byte sent under data parallelism", **scale),
            yaxis=axis("under model parallelism", **scale),
            showlegend=True,
            legend=layout(0)["legend"] | {"itemsizing": "constant"},
            hovermode="closest",
            annotations=[
                note("better split by columns", x=bounds[0], y=bounds[1]) | {"yanchor": "top", "xshift": 6},
                note("better split by samples", x=bounds[1], y=bounds[0])
                | {"xanchor": "right", "xshift": -6, "yshift": 4},
            ],
            margin={"l": 8, "r": 12, "t": 40, "b": 46},
        ),
    }  # fmt: skip


def _ridges(ridges: Sequence[float], low: float, high: float) -> list[dict[str, Any]]:
    style = {"color": "@wait", "width": 1, "dash": "dot"}
    hover = {"hoverinfo": "skip", "line": style, "legendgroup": "ridge", "name": "ridge point"}
    return [
        # One entry of the legend for all of them.
        line(x, y, "@wait", showlegend=not number and is_first, **hover)
        for number, ridge in enumerate(ridges)
        for is_first, x, y in (
            (True, [ridge, ridge], [low, high]),
            (False, [low, high], [ridge, ridge]),
        )
    ]


def _dots(rows: Sequence[LayerRow]) -> list[dict[str, Any]]:
    most = max(row.flops for row in rows)
    return [
        markers(
            [row.one.data_intensity for row in mine],
            [row.one.model_intensity for row in mine],
            [_hover(row) for row in mine],
            symbol=symbol(family),
            color=family_colour(family),
            opacity=0.78,
            # By the root, so that areas and not diameters are in proportion.
            size=[max(_SMALLEST, _LARGEST * math.sqrt(row.flops / most)) for row in mine],
        )
        | {"name": kind(family)}
        # A trace for each family, which is an entry of the legend.
        for family in dict.fromkeys(row.one.layer.family for row in rows)
        for mine in ([row for row in rows if row.one.layer.family == family],)
    ]


def _hover(row: LayerRow) -> str:
    one = row.one
    better = f"<br>{one.better} parallelism: {times(one.ratio)}" if one.better else ""
    return (
        f"<b>{plain(row.name)}</b><br>{units.quantity(row.flops, 'FLOP')}<br>"
        f"data: {units.num_bytes(one.data_bytes)} sent, {units.digits3(one.data_intensity or 0.0)} FLOP/B<br>"
        f"model: {units.num_bytes(one.model_bytes)} sent, {units.digits3(one.model_intensity or 0.0)} FLOP/B"
        f"{better}"
    )
