"""Intensities of layers as text for the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.reporting.layer_rows import (
    HEAD,
    NUMERIC,
    WAYS,
    WAYS_HEAD,
    intensity_reading,
    rest_lines,
    row_cells,
    rows_of,
    way_cells,
)
from ridgeline.reporting.terminal.text import table, title, warnings
from ridgeline.simulator.layers.intensity import Intensities


def intensity_text(found: Intensities) -> RenderableType:
    """The layers with what they send and FLOP per byte of it, either way, and the model as a whole."""
    line = (
        f"{found.workers} workers, {found.samples} samples together, {units.quantity(found.flops, 'FLOP')} "
        "each; bytes that each sends in a step"
    )
    rows = table(HEAD, right=NUMERIC)
    for row in rows_of(found):
        rows.add_row(*row_cells(row))
    ways = table(WAYS_HEAD, right=(1, 2, 3))
    for way, name in WAYS:
        ways.add_row(*way_cells(found, way, name))
    return Group(
        title(f"Layers of {found.title}", line),
        rows,
        *(Text(f"{text}.", style="dim") for text in rest_lines(found)),
        title("Whole", "what all layers send"),
        ways,
        Text(""),
        Text(intensity_reading(found)),
        *warnings(found.notes),
    )
