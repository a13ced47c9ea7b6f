"""How every figure of the report looks: plain dictionaries of data and layout, as Plotly takes them.

Colours are names (`"@forward"`), which the page turns into the light or dark colour of its palette.
The look is set here once: thin grid, no frames, direct labels, room where it is needed.
"""

from collections.abc import Sequence
from typing import Any, Literal

Figure = dict[str, Any]
LOG = {"type": "log", "exponentformat": "SI", "dtick": 1}
"""Of an axis whose ticks are decades."""
FINE = {"type": "log", "dtick": "D2", "tickformat": ".2~s"}
"""Of one with ticks at 2 and 5, too, as whole numbers: by itself Plotly writes their first digit alone."""


def axis(title: str = "", **settings: Any) -> dict[str, Any]:
    """An axis in the look of the report; `settings` are Plotly's and win."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": "@faint"}, "standoff": 10},
        "gridcolor": "@grid",
        "gridwidth": 1,
        "zeroline": False,
        "linecolor": "@line",
        "tickfont": {"size": 12, "color": "@soft"},
        # Labels are of any length, which a fixed margin would cut.
        "automargin": True,
    } | settings


def layout(height: int, **settings: Any) -> dict[str, Any]:
    """A figure's layout in the look of the report; `settings` are Plotly's and win."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 12, "b": 40},
        # The card behind it shows through, in the light and in the dark theme.
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": "@soft"},
        "hoverlabel": {
            "bgcolor": "@card",
            "bordercolor": "@line",
            "font": {"color": "@ink", "size": 13},
            "align": "left",
        },
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 12, "color": "@soft"},
            "itemsizing": "trace",
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@faint", "activecolor": "@ink"},
        "showlegend": False,
    } | settings


def line(
    x: Sequence[float], y: Sequence[float | None], colour: str, **settings: Any
) -> dict[str, Any]:
    """A line trace; Plotly's `settings` win."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2},
    } | settings


def note(
    text: str, *, x: float, y: float, xref: str = "x", colour: str = "@faint"
) -> dict[str, Any]:
    """A word or two inside a figure, without an arrow."""
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": xref,
        # At the right edge of the paper a word would leave it, unless it ends there.
        "xanchor": "right" if xref == "paper" else "left",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": colour},
    }


def rule(along: Literal["x", "y"], at: float, colour: str, **style: Any) -> dict[str, Any]:
    """A straight line across the whole figure at one value of an axis; `style` is Plotly's, of lines."""
    across = "y" if along == "x" else "x"
    return {
        "type": "line",
        f"{along}0": at,
        f"{along}1": at,
        f"{across}ref": "paper",
        f"{across}0": 0,
        f"{across}1": 1,
        "line": {"color": colour, "width": 1.5, **style},
    }


def markers(
    x: Sequence[float | None], y: Sequence[float | None], text: Sequence[str], **marker: Any
) -> dict[str, Any]:
    """A trace of dots that tell their text; `marker` is Plotly's."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": list(y),
        "text": list(text),
        "hovertemplate": "%{text}<extra></extra>",
        # A rim in the colour of the card parts dots that overlap.
        "marker": {"line": {"width": 1, "color": "@card"}, **marker},
    }


def plain(text: str) -> str:
    """Text for a figure, where Plotly would read `<b>` and links as markup."""
    # `&` first: later it would escape what the others were replaced by.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
