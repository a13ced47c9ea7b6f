"""Section of the report about the intensity of layers on the wire."""

from ridgeline.reporting.charts.chart_intensity import drawn_rows, intensity_figure
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
from ridgeline.reporting.page.html import Content, Markup, table, tag
from ridgeline.reporting.page.sections import chart, facts, note_list, section
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
    body: list[tuple[Content, ...]] = [row_cells(row) for row in rows]
    ways: list[tuple[Content, ...]] = [way_cells(found, way, name) for way, name in WAYS]
    return section(
        IDENTITY,
        f"Layers on the wire, {found.workers} workers, {found.samples} samples",
        intensity_reading(found),
        chart(IDENTITY, figure, label) if figure is not None else None,
        table(HEAD, body, caption="Layers, and what each worker sends for them", numeric=NUMERIC),
        tag("h3", "What all layers send"),
        table(WAYS_HEAD, ways, caption="The whole model, one way or the other", numeric=(1, 2, 3)),
        facts(_COUNTED),
        note_list(notes),
    )
