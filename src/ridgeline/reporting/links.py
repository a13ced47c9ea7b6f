"""The transfers of a machine in few words: one curve a kind of link, one rate for each pair of devices."""

from typing import NamedTuple

from ridgeline import units
from ridgeline.machine import Machine
from ridgeline.reporting.grid import Grid


def links_by_kind(machine: Machine) -> dict[str, dict[int, float]]:
    """Kind of link to seconds by size; where there are several of a kind, those of the slowest."""
    grouped: dict[str, list[dict[int, float]]] = {}
    for link in machine.links:
        if not link.table:  # it could not be measured, and is none of those that the slowest is of
            continue
        table = {point.num_bytes: point.seconds.value for point in link.table}
        grouped.setdefault(link.direction.replace("_", " "), []).append(table)
    found: dict[str, dict[int, float]] = {}
    for kind, tables in grouped.items():
        name = kind if len(tables) == 1 else f"{kind}, slowest of {len(tables)}"
        sizes = sorted({size for table in tables for size in table})
        # Of those that have a size, as tables may differ in theirs.
        found[name] = {s: max(table[s] for table in tables if s in table) for s in sizes}
    return found


class LinkMatrix(NamedTuple):
    """Bytes per second from each device (row) to each other one (column); None where none was measured."""

    names: tuple[str, ...]
    rows: tuple[tuple[float | None, ...], ...]


def link_matrix(machine: Machine) -> LinkMatrix | None:
    """The rates of all pairs; None where there is only one GPU, which has no pairs to report."""
    rates = link_rates(machine)
    # By length first: `cuda:10` comes behind `cuda:2`, as it does on the host.
    names = tuple(sorted({name for ends in rates for name in ends}, key=lambda n: (len(n), n)))
    # The host and a single GPU are two names.
    if len(names) < 3:
        return None
    return LinkMatrix(names, tuple(tuple(rates.get((a, b)) for b in names) for a in names))


def link_rates(machine: Machine) -> dict[tuple[str, str], float]:
    """(source, target) to bytes per second at the largest size measured."""
    return {
        link.ends: link.table[-1].num_bytes / link.table[-1].seconds.value
        for link in machine.links
        if link.table
    }


def matrix_grid(matrix: LinkMatrix) -> Grid:
    """The same as a table, with units."""
    rows = tuple(
        (source, *("" if rate is None else units.quantity(rate, "B/s") for rate in rates))
        for source, rates in zip(matrix.names, matrix.rows, strict=True)
    )
    return Grid("Links", ("From", *(f"to {name}" for name in matrix.names)), rows)


def sizes_grid(machine: Machine) -> Grid | None:
    """A row for each size and a column for each collective or kind of link; None where there are none."""
    columns: dict[str, dict[int, float]] = {}
    for entry in machine.collectives:
        workers = units.counted(entry.setting.workers, "worker")
        name = f"{entry.operation}\n{entry.backend}, {workers}"
        columns[name] = {point.num_bytes: point.seconds.value for point in entry.table}
    for kind, seconds in links_by_kind(machine).items():
        # In two lines, as a column is as wide as its heading.
        columns[kind.replace(", ", "\n")] = seconds
    if not columns:
        return None
    rows = tuple(
        (
            units.num_bytes(size),
            *(units.seconds(column[size]) if size in column else "" for column in columns.values()),
        )
        for size in sorted({size for column in columns.values() for size in column})
    )
    return Grid("Transfers", ("Size", *columns), rows, right=range(len(columns) + 1))
