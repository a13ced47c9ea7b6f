"""The nouns as text for the terminal: ceilings, operators, plans, scaling.

Every function returns something that rich prints. On a terminal there are rules and colours; piped,
the same columns come as plain text. `verdict_text` and `timeline_text` are in `text_step`.
"""

import errno
import io
import os
import sys
from collections.abc import Iterable, Mapping
from typing import IO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline import units
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import Ranking
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import gpus_of, numbers_grid
from ridgeline.reporting.links import link_matrix, matrix_grid, sizes_grid
from ridgeline.reporting.operators import (
    MOST_OPS,
    OpTime,
    group_ops,
    operators_grid,
    seconds_by,
)
from ridgeline.reporting.plan_grids import MOST_PLANS, knobs_grid, plans_grid
from ridgeline.reporting.terminal.fitted import FittedTable, bars
from ridgeline.workload import Workload

PIPED_WIDTH = 160
"""Columns when the output is not a terminal, so that files do not depend on where they were made."""
BAR_WIDTH = 24


def console(file: IO[str] | None = None) -> Console:
    """A console on `file` (stdout), which takes colours only to a terminal."""
    stream = file or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?", and no error
    # Rich would else colour every number in a sentence.
    target = _ReadConsole(file=file, highlight=False, soft_wrap=False)
    if not target.is_terminal:
        target = _ReadConsole(file=file, highlight=False, width=PIPED_WIDTH, color_system=None)
    return target


class _ReadConsole(Console):
    """A console that says when its reader has gone; rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Let whoever prints see it: the command line has an exit status for it."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def machine_text(machine: Machine) -> RenderableType:
    """Ceilings and costs with their spread and source, then the collectives by size."""
    host = machine.host
    memory = units.num_bytes(host.memory_bytes)
    hardware = (host.processor, f"{host.cores} cores", memory, *gpus_of(machine.devices))
    line = f"{', '.join(hardware)}; torch {host.torch}; fingerprint {machine.fingerprint}"
    parts = [title("Machine", line), grid_text(numbers_grid(machine))]
    if (sizes := sizes_grid(machine)) is not None:
        parts.append(grid_text(sizes, "median seconds by size"))
    if (matrix := link_matrix(machine)) is not None:
        parts.append(grid_text(matrix_grid(matrix), "bytes per second at the largest size"))
    parts += warnings(machine.warnings)
    return Group(*parts)


def workload_text(workload: Workload, times: Mapping[int, OpTime] | None = None) -> RenderableType:
    """Totals of a step and its largest kinds of operators.

    Args:
        workload: The step of one worker.
        times: Op index to its time (see `operators.times_on_machine`); without it the table is by
            FLOP and bytes and has no bounds.
    """
    groups = group_ops(workload, times or {})
    line = (
        f"{workload.samples} samples, {len(workload.ops)} operators, "
        f"{units.quantity(workload.flops, 'FLOP')}, {units.num_bytes(workload.bytes_moved)} moved, "
        f"{units.num_bytes(sum(p.num_bytes for p in workload.gradients))} of gradients, "
        f"memory peak {units.num_bytes(workload.peak_memory_bytes)}"
    )
    parts = [grid_text(operators_grid(groups, f"Workload {workload.name}"), line)]
    if times:
        shares = seconds_by(groups, "bound")
        total = sum(shares.values()) or 1.0
        text = ", ".join(
            f"{name or 'unknown'} {units.percent(s / total)}" for name, s in shares.items()
        )
        parts.append(Text(f"Operator time {units.seconds(total)}; bound by: {text}"))
    hidden = len(groups) - MOST_OPS
    if hidden > 0:
        parts.append(Text(f"{hidden} smaller kinds of operators are not listed.", style="dim"))
    parts += warnings(workload.notes)
    return Group(*parts)


def ranking_text(ranking: Ranking) -> RenderableType:
    """The plans, best first, with predicted and measured time and the reason for each."""
    best = ranking.best
    tried = sum(candidate.measured is not None for candidate in ranking.candidates)
    line = (
        f"{len(ranking.candidates)} simulated, {tried} tried; predictions assumed to be right within "
        f"{units.percent(ranking.error)}"
    )
    parts: list[RenderableType] = [grid_text(plans_grid(ranking.candidates), line)]
    hidden = len(ranking.candidates) - MOST_PLANS
    if hidden > 0:
        parts.append(Text(f"{hidden} slower plans are not listed.", style="dim"))
    if best.plan.choices:
        parts.append(grid_text(knobs_grid(best.plan.choices, "Chosen"), repr(best.plan)))
    else:
        parts.append(title("Chosen", repr(best.plan)))
    return Group(*parts, *warnings(ranking.notes))


def plan_text(plan: Plan) -> RenderableType:
    """A plan as the program that makes it."""
    return title("Plan", repr(plan))


def grid_text(grid: Grid, line: str = "") -> RenderableType:
    """A grid under its heading, with its bars, and what it means behind it.

    Args:
        grid: To show.
        line: Said beside the heading.
    """
    parts: list[RenderableType] = [title(grid.title, line)]
    if grid.rows:
        rows = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
        for index, name in enumerate((*grid.head, *([""] if grid.bars else []))):
            is_number = index in grid.numeric
            # Numbers that are broken at their units cannot be compared.
            rows.add_column(
                name,
                justify="right" if is_number else "left",
                no_wrap=is_number,
                overflow="fold",
            )
        drawn = bars(grid.bars, BAR_WIDTH)
        for index, cells in enumerate(grid.rows):
            # As they are: names in brackets would be taken for markup.
            rows.add_row(
                *map(Text, cells),
                *drawn[index : index + 1],
                style="bold" if index == grid.chosen else None,
            )
        parts.append(FittedTable(rows, grid))
    if grid.reading:
        parts.append(Text(grid.reading))
    return Group(*parts)


def title(name: str, line: str) -> RenderableType:
    """A heading: the bold name, then one line of text."""
    return Text.assemble("\n", (name, "bold"), "  ", line)


def warnings(lines: Iterable[str]) -> list[Text]:
    """What is to be known before the rest is believed, a line each."""
    return [Text(f"! {line}", style="yellow") for line in lines]
