"""Charts of what a GPU gives by size and by blocks, in the report's section on the machine."""

from collections.abc import Iterator

from ridgeline import units
from ridgeline.machine.gpu_levels import GpuLevels
from ridgeline.reporting.charts.chart_rates import byte_ticks, rates_figure
from ridgeline.reporting.charts.figure import LOG, Figure, axis, layout, line
from ridgeline.reporting.page.html import Markup
from ridgeline.reporting.page.sections import chart_box

_COLOURS = ("@forward", "@communication")


def gpu_charts(known: GpuLevels) -> list[Markup]:
    """A box for each that was measured."""
    return list(_boxes(known))


def _boxes(known: GpuLevels) -> Iterator[Markup]:
    if known.stairs is not None or known.sizes is not None:
        reading = (
            "What all multiprocessors read again and again, and an operator that reads and writes."
        )
        yield chart_box("gpu-rates", "GPU bandwidth by size", reading, gpu_rates_figure(known))
    if known.stairs is not None:
        reading = f"A load that waits; L2 holds {units.num_bytes(known.stairs.cache_bytes)}."
        yield chart_box("gpu-latency", "GPU latency by size", reading, gpu_latency_figure(known))
    if known.blocks is not None:
        reading = "Share of the best rate; more blocks bring nothing where the lines are flat."
        yield chart_box("gpu-blocks", "GPU rates by blocks", reading, gpu_blocks_figure(known))


def gpu_rates_figure(known: GpuLevels) -> Figure:
    """Bytes per second by the bytes that are used; needs stairs or sizes."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    if known.stairs is not None:
        curves["read by all multiprocessors"] = [
            (one.num_bytes, one.read.value, one.num_bytes / one.read.value)
            for one in known.stairs.stairs
            if one.read is not None
        ]
    if known.sizes is not None:
        curves[known.sizes.call] = [
            # Read and written, so that it moves twice its size.
            (one.num_bytes, one.rate.value, 2 * one.num_bytes / one.rate.value)
            for one in known.sizes.points
        ]
    return rates_figure(curves, "bytes used", "B", "bytes/s")


def gpu_latency_figure(known: GpuLevels) -> Figure:
    """Seconds of a load that waits, by the bytes that are used; empty without stairs."""
    stairs = known.stairs.stairs if known.stairs is not None else ()
    sizes = [one.num_bytes for one in stairs]
    texts = [f"{units.num_bytes(o.num_bytes)}: {units.seconds(o.access.value)}" for o in stairs]
    drawn = line(
        sizes,
        [one.access.value for one in stairs],
        "@wait",
        name="a load that waits for the one before",
        mode="lines+markers",
        marker={"size": 5},
        text=texts,
        hovertemplate="%{text}<extra></extra>",
    )
    ticks = byte_ticks(sizes[0], sizes[-1]) if sizes else {}
    return {
        "data": [drawn],
        "layout": layout(
            320, xaxis=axis("bytes used", type="log") | ticks, yaxis=axis("seconds", **LOG)
        ),
    }


def gpu_blocks_figure(known: GpuLevels) -> Figure:
    """Share of the best rate by the number of blocks, a line for each kernel; empty without them."""
    curves = known.blocks.curves if known.blocks is not None else ()
    data = [
        line(
            [point.blocks for point in curve.points],
            [point.rate.value / curve.best.rate.value for point in curve.points],
            colour,
            name=curve.work,
            mode="lines+markers",
            marker={"size": 5},
            text=[
                f"{point.blocks} blocks: {units.quantity(point.rate.value, point.rate.unit)}"
                for point in curve.points
            ],
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
        # Not strict: a profile may have one of the kernels alone.
        for curve, colour in zip(curves, _COLOURS, strict=False)
    ]
    return {
        "data": data,
        "layout": layout(
            320,
            xaxis=axis("blocks", type="log", dtick=1),
            yaxis=axis("share of the best rate", tickformat=".0%", rangemode="tozero"),
            showlegend=True,
        ),
    }
