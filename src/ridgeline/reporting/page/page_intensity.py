"""Section of the report about the intensity of layers on the wire."""

from ridgeline.reporting.charts.chart_intensity import drawn_rows, intensity_figure
from ridgeline.reporting.layer_rows import (
    intensity_reading,
    layers_grid,
    rest_lines,
    rows_of,
    ways_grid,
)
from ridgeline.reporting.page.html import Markup
from ridgeline.reporting.page.sections import chart, facts, grid_box, grid_table, note_list, section
from ridgeline.simulator.layers.intensity import Intensities

IDENTITY = "intensity"
_COUNTED = {
    "Data parallelism": (
        "the workers share the samples, and all-reduce the gradients of the weights over a ring: 2 (n-1)/n "
        "of their bytes"
    ),
    "Model parallelism": (
        "each layer is split by columns; its outputs are gathered, (n-1)/n of their bytes, and the gradient "
        "of its input is all-reduced, 2 (n-1)/n (Gholami et al., SPAA 2018)"
    ),
    "Sent": "by one worker in a step; both ways share the FLOP equally, and latencies are left out",
    "The better way": (
        "of each layer; changing from samples to columns is in the layer's own bytes, what changing back "
        "costs (an n-th of the outputs) is left out"
    ),
    "Data from": "samples of all workers from which on data parallelism sends less",
}


def intensity_section(found: Intensities | None) -> Markup | None:
    """The reading, the picture, the layers, the whole, and how bytes were counted; None without layers."""
    if found is None:
        return None
    rows = rows_of(found)
    figure = intensity_figure(found)
    left_out = len(rows) - len(drawn_rows(found))
    notes = [*rest_lines(found), *found.notes]
    if left_out and figure is not None:
        notes.insert(0, f"{left_out} of {len(rows)} rows have no dot: they compute or send nothing")
    label = "Layers by FLOP per byte sent, under data and under model parallelism"
    return section(
        IDENTITY,
        f"Layers on the wire, {found.workers} workers, {found.samples} samples",
        intensity_reading(found),
        chart(IDENTITY, figure, label) if figure is not None else None,
        grid_table(layers_grid(found)),
        grid_box(ways_grid(found)),
        facts(_COUNTED),
        note_list(notes),
    )
