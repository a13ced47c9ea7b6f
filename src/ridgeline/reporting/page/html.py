"""HTML that is escaped by construction: text becomes markup only through `tag`.

Everything a user can name (tasks, modules, files) reaches the page through these functions, so no
caller has to remember to escape. `Markup` marks what is already safe.
"""

import html
import importlib.resources
import json
from collections.abc import Iterable, Sequence
from typing import Any

_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Markup(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


Content = str | Markup | None


def join(parts: Iterable[Content], separator: str = "") -> Markup:
    """The parts one after another, plain text escaped, None left out."""
    return Markup(separator.join(_safe(part) for part in parts if part is not None))


def tag(_tag: str, *children: Content, **attributes: str | int | float | bool | None) -> Markup:
    """One element; children that are not `Markup` are escaped.

    Args:
        _tag: Element name.
        children: Content; None is left out.
        attributes: `class_` becomes `class`, `data_id` becomes `data-id`; True gives a bare
            attribute, None and False leave it out.
    """
    text = "".join(
        f" {name.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{html.escape(str(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if _tag in _VOID:
        return Markup(f"<{_tag}{text}>")
    return Markup(f"<{_tag}{text}>{join(children)}</{_tag}>")


def table(
    head: Sequence[Content],
    body: Iterable[Sequence[Content]],
    *,
    caption: str,
    numeric: Sequence[int] = (),
    highlight: int | None = None,
) -> Markup:
    """A table in a box that scrolls sideways on narrow screens.

    Args:
        head: Column titles.
        body: Rows of cells.
        caption: What the table shows; read out by screen readers, not drawn.
        numeric: Columns set right-aligned in tabular figures.
        highlight: Row drawn as the chosen one.
    """
    right = set(numeric)

    def cells(row: Sequence[Content], name: str) -> Markup:
        # By it screen readers say which heading a cell has.
        scope = "col" if name == "th" else None
        return join(
            tag(name, cell, class_="n" if column in right else None, scope=scope)
            for column, cell in enumerate(row)
        )

    rows = join(
        tag("tr", cells(row, "td"), class_="chosen" if index == highlight else None)
        for index, row in enumerate(body)
    )
    inner = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", cells(head, "th"))),
        tag("tbody", rows),
    )
    # A scrolling region must be reachable by keyboard, so it has a tab stop.
    return tag("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def data_script(name: str, value: Any, **attributes: str) -> Markup:
    """`value` as JSON inside the page, in a form that cannot end the script element early."""
    return raw_data_script(
        # NaN is no JSON, and would end the script that draws the page.
        name,
        json.dumps(value, allow_nan=False, separators=(",", ":")),
        **attributes,
    )


def raw_data_script(name: str, text: str, **attributes: str) -> Markup:
    """JSON text inside the page; `<`, `>` and `&` only occur in strings, where escapes are equal."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Markup(text), type="application/json", id=name, **attributes)


def asset(name: str) -> str:
    """The text of a file that ships inside this package."""
    return (
        importlib.resources.files("ridgeline.reporting").joinpath(name).read_text(encoding="utf-8")
    )


def _safe(part: str) -> str:
    return part if isinstance(part, Markup) else html.escape(part)
