"""Charts of what a GPU gives by size and by blocks, in the report's section on the machine."""

from collections.abc import Iterator

from ridgeline import units
from ridgeline.machine.gpu_levels import GpuBlocks, GpuLevels, GpuStairs
from ridgeline.reporting.charts.chart_places import latency_dot
from ridgeline.reporting.charts.chart_rates import CurveDot, curves_figure, rate_dot
from ridgeline.reporting.charts.figure import LOG, Figure, axis
from ridgeline.reporting.page.html import Markup
from ridgeline.reporting.page.sections import chart_box


def gpu_charts(known: GpuLevels) -> Iterator[Markup]:
    """A box for each that was measured."""
    stairs, blocks = known.stairs, known.blocks
    if stairs is not None or known.sizes is not None:
        reading = (
            "What all multiprocessors read again and again, and an operator that reads and writes."
        )
        yield chart_box("gpu-rates", "GPU bandwidth by size", reading, gpu_rates_figure(known))
    if stairs is not None:
        reading = f"A load that waits; L2 holds {units.num_bytes(stairs.cache_bytes)}."
        yield chart_box("gpu-latency", "GPU latency by size", reading, gpu_latency_figure(stairs))
    if blocks is not None:
        reading = "Share of the best rate; more blocks bring nothing where the lines are flat."
        yield chart_box("gpu-blocks", "GPU rates by blocks", reading, gpu_blocks_figure(blocks))


def gpu_rates_figure(known: GpuLevels) -> Figure:
    """Bytes per second by the bytes that are used; needs stairs or sizes."""
    curves: dict[str, list[CurveDot]] = {}
    if known.stairs is not None:
        curves["read by all multiprocessors"] = [
            rate_dot(one.num_bytes, one.num_bytes / one.read.value)
            for one in known.stairs.stairs
            if one.read is not None
        ]
    if known.sizes is not None:
        curves[known.sizes.call] = [
            # Read and written, so that it moves twice its size.
            rate_dot(one.num_bytes, 2 * one.num_bytes / one.rate.value, moved=2.0)
            for one in known.sizes.points
        ]
    return curves_figure(curves, axis("bytes used", **LOG), axis("bytes/s", **LOG))


def gpu_latency_figure(stairs: GpuStairs) -> Figure:
    """Seconds of a load that waits, by the bytes that are used."""
    dots = [latency_dot(one.num_bytes, one.access.value) for one in stairs.stairs]
    curves = {"a load that waits for the one before": dots}
    return curves_figure(curves, axis("bytes used", type="log"), axis("seconds", **LOG))


def gpu_blocks_figure(blocks: GpuBlocks) -> Figure:
    """Share of the best rate by the number of blocks, a line for each kernel."""
    curves: dict[str, list[CurveDot]] = {
        curve.work: [
            CurveDot(
                point.blocks,
                point.rate.value / curve.best.rate.value,
                f"{point.blocks} blocks: {units.quantity(point.rate.value, point.rate.unit)}",
            )
            for point in curve.points
        ]
        for curve in blocks.curves
    }
    share = axis("share of the best rate", tickformat=".0%", rangemode="tozero")
    return curves_figure(curves, axis("blocks", type="log", dtick=1), share, in_bytes=False)
