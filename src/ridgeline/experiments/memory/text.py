"""The experiment `memory` as text for the terminal: the latencies, then the staircase."""

from rich.console import Group, RenderableType

from ridgeline import units
from ridgeline.experiments.memory.result import Latency, MemoryExperiment
from ridgeline.reporting.effects.cells import seconds
from ridgeline.reporting.effects.stairs import decades, stairs_grid
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.terminal.text import grid_text, title, warnings


def experiment_text(experiment: MemoryExperiment) -> RenderableType:
    """What each access costs, beside the textbook, and the staircase by the bytes that are walked through."""
    host = experiment.host
    sizes = ", ".join(f"{name} {units.num_bytes(size)}" for name, size in experiment.caches.items())
    where = f"{host.processor}, {host.cores} cores; {sizes or 'caches unknown'}; {experiment.date}"
    parts: list[RenderableType] = [title("Memory", where)]
    if experiment.latencies:
        parts.append(grid_text(_latencies(experiment.latencies)))
    if experiment.stairs:
        parts.append(grid_text(stairs_grid(experiment.stairs, experiment.caches)))
    return Group(*parts, *warnings(experiment.notes))


def _latencies(latencies: tuple[Latency, ...]) -> Grid:
    rows = tuple(
        (
            one.name,
            *seconds(one.measured),
            "" if one.textbook_s is None else units.seconds(one.textbook_s),
            one.how or f"not measured: {one.reason}",
        )
        for one in latencies
    )
    # One nanosecond is no bar, as is what was not measured.
    bars = tuple(decades(one.measured.value) if one.measured else 0.0 for one in latencies)
    head = ("", "Here", "Spread", "Textbook", "How")
    return Grid("Latencies", head, rows, right=(1, 2, 3), bars=bars)
