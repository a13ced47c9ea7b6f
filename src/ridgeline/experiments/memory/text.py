"""The experiment `memory` as text for the terminal: the latencies, then the staircase."""

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.experiments.memory.result import Latency, MemoryExperiment
from ridgeline.reporting.labels import spread
from ridgeline.reporting.terminal.text import table, title, warnings
from ridgeline.reporting.terminal.text_stairs import decades, stairs_text


def experiment_text(experiment: MemoryExperiment) -> RenderableType:
    """What each access costs, beside the textbook, and the staircase by the bytes that are walked through."""
    host = experiment.host
    sizes = ", ".join(f"{name} {units.num_bytes(size)}" for name, size in experiment.caches.items())
    where = f"{host.processor}, {host.cores} cores; {sizes or 'caches unknown'}; {experiment.date}"
    parts: list[RenderableType] = [title("Memory", where)]
    if experiment.latencies:
        parts.append(_latencies(experiment.latencies))
    if experiment.stairs:
        parts.append(stairs_text(experiment.stairs, experiment.caches))
    return Group(*parts, *warnings(experiment.notes))


def _latencies(latencies: tuple[Latency, ...]) -> RenderableType:
    rows = table(("", "Here", "Spread", "Textbook", "", "How"), right=(1, 2, 3))
    for one in latencies:
        rows.add_row(
            one.name,
            "" if one.measured is None else units.seconds(one.measured.value),
            "" if one.measured is None else spread(one.measured),
            "" if one.textbook_s is None else units.seconds(one.textbook_s),
            Text("" if one.measured is None else decades(one.measured.value), style="cyan"),
            one.how or f"not measured: {one.reason}",
        )
    return rows
