"""Curves by size: an axis of less than two decades has ticks between them."""

import pytest

from ridgeline.reporting.charts.chart_rates import curves_figure, rate_dot
from ridgeline.reporting.charts.figure import LOG, axis


@pytest.mark.parametrize(
    ("slowest", "fastest", "dtick"),
    [(30e9, 120e9, "D2"), (1e9, 99e9, "D2"), (1e6, 1e9, 1)],
)
def test_a_short_axis_has_ticks_between_decades(
    slowest: float, fastest: float, dtick: str | int
) -> None:
    """With one label nobody could read a value."""
    dots = [rate_dot(1e6, 1e6 / rate) for rate in (slowest, fastest)]
    figure = curves_figure({"copy": dots}, axis("size", **LOG), axis("B/s", **LOG))
    y = figure["layout"]["yaxis"]
    assert y["dtick"] == dtick
    # Whole numbers: by itself Plotly writes `5` for 50G.
    assert y.get("tickformat") == (".2~s" if dtick == "D2" else None)
    assert (
        curves_figure({}, axis("size", **LOG), axis("B/s", **LOG))["layout"]["yaxis"]["dtick"] == 1
    )
