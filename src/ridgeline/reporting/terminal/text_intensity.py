"""Intensities of layers as text for the terminal."""

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.reporting.layer_rows import intensity_reading, layers_grid, rest_lines, ways_grid
from ridgeline.reporting.terminal.text import grid_text, warnings
from ridgeline.simulator.layers.intensity import Intensities


def intensity_text(found: Intensities) -> RenderableType:
    """The layers with what they send and FLOP per byte of it, either way, and the model as a whole."""
    line = (
        f"{found.workers} workers, {found.samples} samples together, {units.quantity(found.flops, 'FLOP')} "
        "each; bytes that each sends in a step"
    )
    return Group(
        grid_text(layers_grid(found), line),
        *(Text(f"{text}.", style="dim") for text in rest_lines(found)),
        grid_text(ways_grid(found)),
        Text(""),
        Text(intensity_reading(found)),
        *warnings(found.notes),
    )
