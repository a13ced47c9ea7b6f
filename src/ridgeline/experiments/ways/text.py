"""Such an experiment as text for the terminal: one table a case."""

from collections.abc import Callable, Iterable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.experiments.ways.result import (
    WAY_KINDS,
    ContestExperiment,
    ContestRow,
    WayCase,
    WayExperiment,
    WayRow,
)
from ridgeline.machine import Quantity
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import gpus_of
from ridgeline.reporting.terminal.text import grid_text, title, warnings

HEADINGS = {
    "async": "Asynchronous execution",
    "parallel": "Automatic parallelism",
    "overlap": "Overlapped copies",
    "allreduce": "All-reduce",
    "sync": "Synchronised steps",
    "kvstore": "Key-value stores",
}


def experiment_text(experiment: WayExperiment) -> RenderableType:
    """All cases, with the machine above them."""
    heading = title(HEADINGS[experiment.name], where_words(experiment))
    return Group(heading, *(case_text(case) for case in experiment.cases))


def where_words(experiment: ContestExperiment) -> str:
    """The GPUs and the processor that were there, and the versions."""
    host = experiment.host
    hardware = (*gpus_of(experiment.devices), host.processor, f"{host.cores} cores")
    return f"{', '.join(hardware)}; {versions_words(experiment.versions)}"


def versions_words(versions: Mapping[str, str]) -> str:
    """What figures depend on, in a line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def case_text(case: WayCase) -> RenderableType:
    """Every way with its time, against the first and against the limit; then what it means."""
    if case.skipped:
        return Group(title(case.name, case.title), *warnings([f"not held here: {case.skipped}"]))
    of = f"per {case.unit}, " if case.unit != "run" else ""
    runs = "run" if case.calls == 1 else "runs"
    line = f"{case.title}; {of}{case.turns} turns of {case.calls} {runs}"
    lines = [Text(line) for line in (*conclusions(case), *case.notes)]
    return Group(grid_text(_grid(case), line), *lines, *_remarks(case))


def _grid(case: WayCase) -> Grid:
    """The ways by kind, our fastest one marked, then the limit."""
    shown = [row for row in case.rows if row.status != "skipped"]
    shown.sort(key=lambda row: WAY_KINDS.index(row.kind))
    extra = {name: cell for name, cell in _EXTRA.items() if any(cell(row) for row in case.rows)}
    head = ("", "Time", "Quartiles", "x first", "Of limit", *extra, "Difference", "")
    rows: list[tuple[str, ...]] = [
        (
            row.name,
            *_figures(row),
            *(cell(row) for cell in extra.values()),
            gap_cell(row),
            row.reason,
        )
        for row in shown
    ]
    if case.limit is not None:
        limit = ("limit", units.seconds(case.limit.seconds))
        rows.append((*limit, *[""] * (len(head) - len(limit))))
    # The one that the line below the table is about.
    best = case.fastest("ridgeline")
    chosen = None if best is None else shown.index(best)
    return Grid(case.name, head, tuple(rows), right=range(1, len(head) - 1), chosen=chosen)


def conclusions(case: WayCase) -> list[str]:
    """How our fastest way compares with the first, with the best of the others, and with the limit."""
    ours, first = case.fastest("ridgeline"), case.rows[0] if case.rows else None
    if ours is None or ours.seconds is None or first is None or ours.times_faster is None:
        return []
    said = [f"{ours.times_faster.value:.2f} times {first.name}"]
    peer = case.fastest("peer")
    if peer is not None and peer.seconds is not None and peer is not first:
        said.append(f"{peer.seconds.value / ours.seconds.value:.2f} times {peer.name}")
    if ours.of_limit is not None and case.limit is not None:
        said.append(f"{units.percent(ours.of_limit)} of the limit ({case.limit.reason})")
    if ours.peak_bytes is not None and peer is not None and peer.peak_bytes is not None:
        peaks = units.num_bytes(ours.peak_bytes), units.num_bytes(peer.peak_bytes)
        said.append(f"at most {peaks[0]} alive instead of {peaks[1]}")
    return [f"{ours.name}: {', '.join(said)}"]


def _figures(row: WayRow) -> tuple[str, str, str, str]:
    if row.seconds is None:
        return (row.status, "", "", "")
    return (
        units.seconds(row.seconds.value),
        quartiles_cell(row.seconds),
        "" if row.times_faster is None else f"{row.times_faster.value:.2f}",
        "" if row.of_limit is None else units.percent(row.of_limit),
    )


def _shown(name: str, show: Callable[[float], str]) -> Callable[[WayRow], str]:
    """A cell of a column that only some cases have."""

    def cell(row: WayRow) -> str:
        value = getattr(row, name)
        return "" if value is None else show(value)

    return cell


_EXTRA = {
    "Predicted": _shown("predicted_s", units.seconds),
    "Bus": _shown("bus_bytes_per_s", lambda value: units.quantity(value, "B/s")),
    "On the wire": _shown("wire_bytes", units.num_bytes),
    "Hidden": _shown("hidden", units.percent),
    "Peak": _shown("peak_bytes", units.num_bytes),
}
"""Columns that only some cases have."""


def gap_cell(row: ContestRow) -> str:
    """The difference of a row; "0" says that there is none."""
    return "" if row.difference is None else f"{row.difference:.1e}" if row.difference else "0"


def quartiles_cell(seconds: Quantity) -> str:
    """From the lower to the upper quartile."""
    return f"{units.seconds(seconds.low)} .. {units.seconds(seconds.high)}"


def skipped_lines(rows: Iterable[ContestRow]) -> list[str]:
    """Each reason not to run some, with those that it met."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.status == "skipped":
            names.setdefault(row.reason, []).append(row.name)
    return [f"{reason}: {', '.join(those)}" for reason, those in names.items()]


def _remarks(case: WayCase) -> list[Text]:
    """What ways say about themselves, and why some did not run."""
    lines = [Text(f"{row.name}: {note}", style="dim") for row in case.rows for note in row.notes]
    return lines + warnings(skipped_lines(case.rows))
