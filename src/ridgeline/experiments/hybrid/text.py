"""The experiment as text for the terminal: one table a case."""

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.experiments.hybrid.result import (
    BASE,
    PURPOSES,
    CaseResult,
    HybridExperiment,
    HybridRow,
)
from ridgeline.experiments.ways.text import gap_cell, quartiles_cell, skipped_lines, where_words
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.terminal.text import grid_text, title, warnings

WARM = "warm cache: break-even counts the seconds of the first that compiled, if those were more"
_KINDS = ("peer", "ridgeline", "bound")


def experiment_text(experiment: HybridExperiment) -> RenderableType:
    """All cases, with the machine above them."""
    return Group(
        title("Hybrid execution", where_words(experiment)),
        *(case_text(case) for case in experiment.cases),
        *warnings(experiment.notes),
    )


def case_text(case: CaseResult) -> RenderableType:
    """Every contender with its time, what preparing costs, and after how many calls that is earned back."""
    unit = "calls" if case.purpose == "callable" else "steps"
    # Skipped ones are told in lines below, several with one reason.
    shown = [row for row in case.rows if row.status != "skipped"]
    shown.sort(key=lambda row: _KINDS.index(row.kind))
    # Of those that keep outputs, as ordinary semantics want it.
    fastest = case.fastest("ridgeline", may_overwrite=False)
    head = ("", "Per call", "Quartiles", "x eager", "Ready after", "Break-even", "Difference", "")
    grid = Grid(
        f"{case.model} {PURPOSES[case.purpose]}",
        head,
        tuple(map(_cells, shown)),
        right=range(1, 7),
        chosen=None if fastest is None else shown.index(fastest),
    )
    legend = [Text(WARM, style="dim")] if any(row.is_warm for row in shown) else []
    return Group(
        grid_text(grid, f"{case.title}; {case.turns} turns of {case.calls} {unit}"),
        *legend,
        *map(Text, conclusions(case)),
        *warnings((*skipped_lines(case.rows), *case.notes)),
    )


def conclusions(case: CaseResult) -> list[str]:
    """How ours compare with the best peer, and with what cannot be beaten."""
    ours = case.fastest("ridgeline", may_overwrite=False)
    peer = case.fastest("peer")
    if ours is None or ours.seconds is None or peer is None or BASE not in ours.times_faster:
        return []
    against = ours.times_faster[peer.name].value
    faster = ours.times_faster[BASE].value
    versus = f"{against:.2f} times the fastest peer ({peer.name})"
    lines = [f"{ours.name}: {faster:.2f} times eager, {versus}"]
    bound = case.fastest("bound")
    if bound is not None and bound.seconds is not None:
        reached = units.percent(bound.seconds.value / ours.seconds.value)
        lines.append(f"{reached} of {bound.name}, which copies no inputs and keeps no outputs")
    if case.limit is not None:
        reached = units.percent(case.limit.seconds / ours.seconds.value)
        lines.append(
            f"{reached} of the limit, {units.seconds(case.limit.seconds)}: {case.limit.reason}"
        )
    return lines


def _cells(row: HybridRow) -> tuple[str, ...]:
    if row.seconds is None or row.prepare_s is None:
        return (row.name, row.status, "", "", "", "", "", row.reason)
    remarks = [f"chose {row.chosen}"] if row.chosen else []
    if row.is_warm:
        remarks.append("warm cache")
    if row.overwrites:
        remarks.append("a later call overwrites the output")
    faster = row.times_faster.get(BASE)
    return (
        row.name,
        units.seconds(row.seconds.value),
        quartiles_cell(row.seconds),
        "" if faster is None else f"{faster.value:.2f}",
        units.seconds(row.prepare_s),
        "" if row.break_even is None else f"{row.break_even}",
        gap_cell(row),
        "; ".join(remarks),
    )
