"""The experiment `memory` as text for the terminal: the latencies, then the staircase."""

import math

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.experiments.memory.result import Latency, MemoryExperiment
from ridgeline.machine import Quantity
from ridgeline.reporting.text import bar, table, title

WIDTH = 30
SHORTEST_S = 1e-9
"""Where the bars begin; each decade is as long."""


def experiment_text(experiment: MemoryExperiment) -> RenderableType:
    """What each access costs, beside the textbook, and the staircase by the bytes that are walked through."""
    host = experiment.host
    sizes = ", ".join(f"{name} {units.num_bytes(size)}" for name, size in experiment.caches.items())
    where = f"{host.processor}, {host.cores} cores; {sizes or 'caches unknown'}; {experiment.date}"
    parts: list[RenderableType] = [title("Memory", where)]
    if experiment.latencies:
        parts.append(_latencies(experiment.latencies))
    if experiment.stairs:
        parts += [
            title("Staircase", "one access after another, by the bytes walked through"),
            _stairs(experiment),
        ]
    return Group(*parts, *(Text(f"! {note}", style="yellow") for note in experiment.notes))


def _latencies(latencies: tuple[Latency, ...]) -> RenderableType:
    rows = table(("", "Here", "Spread", "Textbook", "", "How"), right=(1, 2, 3))
    for one in latencies:
        rows.add_row(
            one.name,
            "" if one.measured is None else units.seconds(one.measured.value),
            "" if one.measured is None else _spread(one.measured),
            "" if one.textbook_s is None else units.seconds(one.textbook_s),
            Text("" if one.measured is None else _bar(one.measured.value), style="cyan"),
            one.how or f"not measured: {one.reason}",
        )
    return rows


def _stairs(experiment: MemoryExperiment) -> RenderableType:
    rows = table(
        ("Bytes", "Access", "Spread", "Read in order", "One word a line", ""), right=range(5)
    )
    marks = {size: name for name, size in experiment.caches.items()}
    for stair, after in zip(experiment.stairs, (*experiment.stairs[1:], None), strict=True):
        ends = [
            name
            for size, name in marks.items()
            if stair.num_bytes <= size and (after is None or after.num_bytes > size)
        ]
        rows.add_row(
            units.num_bytes(stair.num_bytes),
            units.seconds(stair.access_s.value),
            _spread(stair.access_s),
            units.quantity(8.0 / stair.word_s.value, "B/s"),
            units.seconds(stair.line_s.value),
            Text(
                f"{_bar(stair.access_s.value)} {' '.join(f'{name} ends' for name in ends)}",
                style="cyan",
            ),
        )
    return rows


def _spread(quantity: Quantity) -> str:
    return units.percent((quantity.high - quantity.low) / quantity.value)


def _bar(seconds: float) -> str:
    """Longer by as much for each factor of ten."""
    return bar(math.log10(max(seconds, SHORTEST_S) / SHORTEST_S) / 6.0, WIDTH)
