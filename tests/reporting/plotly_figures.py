"""Figures as Plotly sees them: it knows every property, and takes every value."""

from typing import Any

from plotly.graph_objects import Figure as PlotlyFigure


def taken_by_plotly(figure: dict[str, Any]) -> PlotlyFigure:
    """The figure, with colours as the page would put them for their names.

    Raises:
        ValueError: Plotly has no such property, or not such a value of it.
    """
    shown = _coloured(figure)
    return PlotlyFigure(data=shown["data"], layout=shown["layout"])


def _coloured(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("@"):
        return "#123456"
    if isinstance(value, list):
        return [_coloured(part) for part in value]
    if isinstance(value, dict):
        return {key: _coloured(part) for key, part in value.items()}
    return value
