"""What every section of the report is made of: heading, reading, chart, table, bar, swatch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.reporting.charts.figure import Figure
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import as_sentence
from ridgeline.reporting.page.html import Content, Markup, data_script, join, table, tag

# A number, a space and a unit: no line shall break at that space.
_BEFORE_UNIT = re.compile(r"(\d) (?=%|(?:[num]?s|[kKMGTP]?i?B|[kMGTP]?FLOP)\b)")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a bar list; `start`, `length` and `mark` are fractions of the track.

    `length` below zero reaches to the left of `start`. `mark` is a tick across the bar.
    """

    name: str
    value: str
    start: float = 0.0
    length: float = 0.0
    colour: str = "@other"
    note: str = ""
    share: str = ""
    mark: float | None = None
    is_strong: bool = False
    is_ruled: bool = False


def section(identity: str, title: str, reading: str, *children: Content) -> Markup:
    """A section with its heading and the sentence that reads the picture for the visitor."""
    return tag(
        "section",
        tag("h2", title, id=f"{identity}-title"),
        sentence(reading),
        *children,
        id=identity,
        aria_labelledby=f"{identity}-title",
    )


def sentence(reading: str) -> Markup:
    """The reading of a picture; numbers stay on one line with their units."""
    return tag("p", bound_units(reading), class_="reading")


def bound_units(text: str) -> str:
    """The text with numbers and units that no line break separates."""
    return _BEFORE_UNIT.sub("\\1\u00a0", text)


def chart(identity: str, figure: Figure, label: str, *, has_keys: bool = False) -> Markup:
    """The place of a figure and its description, which the script of the page draws."""
    height = figure["layout"]["height"]
    # The script needs the range that was drawn first, to come back to it.
    start, end = figure["layout"].get("xaxis", {}).get("range") or (0, 0)
    box = tag(
        "div",
        class_="chart",
        style=f"height:{height}px",
        data_figure=f"figure-{identity}",
        data_keys=has_keys,
        data_range=f"{start},{end}" if has_keys else None,
        tabindex="0" if has_keys else None,
        role="group" if has_keys else "img",
        aria_label=label,
    )
    return join((box, data_script(f"figure-{identity}", figure)))


def chart_box(identity: str, title: str, reading: str, figure: Figure) -> Markup:
    """A figure under a heading and the sentence that reads it, one of several in a grid."""
    return tag("div", tag("h3", title), sentence(reading), chart(identity, figure, title))


def grid_table(grid: Grid) -> Markup:
    """A grid without its heading, which screen readers say."""
    # A cell of several lines keeps them.
    rows = [[join(cell.split("\n"), "<br>") for cell in row] for row in grid.rows]
    return table(grid.head, rows, caption=grid.title, numeric=grid.numeric, highlight=grid.chosen)


def grid_box(grid: Grid) -> Markup:
    """A grid under its heading and the sentence that reads it; one without rows is its sentence."""
    said = sentence(grid.reading) if grid.reading else None
    return join((tag("h3", grid.title), said, grid_table(grid) if grid.rows else None))


def facts(told: Mapping[str, Content]) -> Markup:
    """Names with what is told of each."""
    rows = (tag("div", tag("dt", name), tag("dd", text)) for name, text in told.items())
    return tag("dl", *rows, class_="facts")


def note_list(notes: Sequence[str]) -> Markup | None:
    """Each note as a sentence; None without any."""
    if not notes:
        return None
    return tag("ul", *(tag("li", bound_units(as_sentence(note))) for note in notes), class_="notes")


def bars(rows: Sequence[Bar], *, label: str, kind: str = "") -> Markup:
    """A list of labelled bars, drawn without a script."""
    items = []
    for row in rows:
        if row.is_ruled:
            items.append(tag("div", class_="rule", role="presentation"))
        strong = " strong" if row.is_strong else ""
        note = tag("small", row.note) if row.note else None
        share = tag("small", row.share) if row.share else None
        items.append(
            tag(
                "div",
                tag("div", row.name, note, class_=f"name{strong}"),
                tag("div", row.value, share, class_=f"value{strong}"),
                _track(row),
                class_="row",
                role="listitem",
            )
        )
    return tag("div", join(items), class_=f"bars {kind}".strip(), role="list", aria_label=label)


def swatch(colour: str) -> Markup:
    """A small square in a colour of the palette."""
    return tag("span", class_="swatch", style=f"background:{css(colour)}", aria_hidden="true")


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Names and colours of what a figure shows, in the order given."""
    return tag("ul", *(tag("li", swatch(shade), name) for name, shade in entries), class_="legend")


def css(colour: str) -> str:
    """`@forward` as the CSS value `var(--forward)`."""
    return f"var(--{colour[1:]})" if colour.startswith("@") else colour


def _track(row: Bar) -> Markup:
    low = min(1.0, max(0.0, min(row.start, row.start + row.length)))
    # Cut to the track: parts below zero and beyond the step would be drawn over the words.
    high = min(1.0, max(0.0, row.start, row.start + row.length))
    fill = tag(
        "div",
        class_="fill",
        style=f"left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%;background:{css(row.colour)}",
    )
    mark = None
    if row.mark is not None:
        place = 100 * min(1.0, max(0.0, row.mark))
        mark = tag("div", class_="mark", style=f"left:calc({place:.2f}% - 1.5px)")
    return tag("div", fill, mark, class_="track", aria_hidden="true")
