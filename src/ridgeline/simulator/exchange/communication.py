"""Seconds of collective operations on a machine, from its measured size tables, and what they slow."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from ridgeline.errors import MachineError
from ridgeline.laws.collectives import AT_MOST, CollectiveOperation, bus_bandwidth_factor
from ridgeline.laws.curves import Point, table_seconds
from ridgeline.machine import Collective, Machine, Overlap, Setting
from ridgeline.machine.cluster import Crossing, crossings
from ridgeline.plan import Sync
from ridgeline.simulator.exchange.between_hosts import points_between_hosts
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.simulator.pricing.settings import nearest_setting
from ridgeline.synchronisation import uses_kernels
from ridgeline.timeline import Lane


class CommunicationCost(NamedTuple):
    """Seconds of one operation; `note` says what was assumed, empty when it was measured."""

    seconds: float
    note: str


class CostTable(NamedTuple):
    """A measured size table, and how it is scaled to the workers that are asked for."""

    points: tuple[Point, ...]
    latency_s: float
    hop_ratio: float
    factor_ratio: float
    note: str


def collective_seconds(
    machine: Machine, operation: CollectiveOperation, num_bytes: float, setting: Setting
) -> CommunicationCost:
    """Seconds of `operation` on `num_bytes` over `setting.workers` workers.

    Between measured sizes it is interpolated. Where the machine describes a cluster, and the workers do not
    fit into one of its hosts, see `between_hosts`. Else a number of workers that was not measured scales the
    table of the largest number that was, by the ring: latency with 2 (n-1) messages, the rest with the
    bytes that cross each link. A missing broadcast is taken to cost no more than an all-reduce.

    `num_bytes` is the payload on each worker.

    Raises:
        MachineError: no such operation was measured.

    Source: tables are measured; scaling over workers by Patarasuk, Yuan 2009 (see `laws`).
    """
    if setting.workers == 1:
        return CommunicationCost(0.0, "")
    return table_cost(find_table(machine, operation, setting), num_bytes)


@kept_by_identity(64)
def find_table(machine: Machine, operation: CollectiveOperation, setting: Setting) -> CostTable:
    """The size table to use, and how it must be scaled; found once and kept.

    Raises:
        MachineError: no such operation was measured.
    """
    crossed = crossings(machine.cluster, setting.workers)
    for name in dict.fromkeys((operation, AT_MOST.get(operation, operation))):
        found = [
            entry
            for entry in machine.collectives
            if entry.operation == name and entry.setting.device == setting.device and entry.table
        ]
        table = None
        # A host of one device needs no table: everything leaves it.
        if crossed and (found or crossed[0].devices == 1):
            table = _between_hosts(operation, found, setting, crossed)
        elif found:
            table = _scaled(found, setting)
        if table is None:
            continue
        if name == operation:
            return table
        notes = (table.note, f"{operation} was not measured: assumed as {name}")
        return table._replace(note="; ".join(filter(None, notes)))
    known = ", ".join(f"{c.operation} at {c.setting}" for c in machine.collectives) or "none"
    raise MachineError(
        f"wanted the time of {operation} over {setting.workers} workers ({setting.device}), got a "
        f"profile whose collectives are: {known} ({machine.fingerprint}); run `ridgeline measure` where "
        "several workers can start"
    )


def table_cost(table: CostTable, num_bytes: float) -> CommunicationCost:
    """Seconds for `num_bytes` by a table from `find_table`."""
    seconds = table_seconds(table.points, num_bytes)
    if table.factor_ratio != 1.0 or table.hop_ratio != 1.0:
        # Latency grows with the messages, the rest with the bytes that cross a link: scaled one by one.
        moving = max(0.0, seconds - table.latency_s)
        seconds = table.latency_s * table.hop_ratio + moving * table.factor_ratio
    return CommunicationCost(seconds, table.note)


def _scaled(found: Sequence[Collective], setting: Setting) -> CostTable:
    same = [entry for entry in found if entry.setting.workers == setting.workers]
    if same:
        # Threads change a collective far less than the number of workers does.
        entry = min(same, key=lambda e: abs(e.setting.threads - setting.threads))
        note = ""
        if entry.setting.threads != setting.threads:
            note = f"{entry.operation} over {setting} assumed as measured over {entry.setting}"
        return CostTable(_points(entry), 0.0, 1.0, 1.0, note)
    # The largest has the most messages in its latency, and is mostly the nearest to what is asked for.
    entry = max(found, key=lambda e: e.setting.workers)
    measured, wanted = entry.setting.workers, setting.workers
    points = _points(entry)
    moved, known = (bus_bandwidth_factor(entry.operation, n) for n in (wanted, measured))
    note = (
        f"{entry.operation} over {wanted} workers was not measured: assumed by the ring law from "
        f"{measured} workers"
    )
    return CostTable(
        points, ring_latency(points), (wanted - 1) / (measured - 1), moved / known, note
    )


def _between_hosts(
    operation: CollectiveOperation,
    found: Sequence[Collective],
    setting: Setting,
    crossed: Sequence[Crossing],
) -> CostTable:
    """The table of a job on several hosts of the described cluster, from that of one host."""
    in_host = crossed[0].devices
    fitting = [entry for entry in found if entry.setting.workers <= in_host]
    entry = max(fitting, key=lambda e: e.setting.workers) if fitting else None
    if entry is None and in_host > 1:
        # Over more devices than a host has, but nearer to the truth than links inside that take no time.
        entry = min(found, key=lambda e: e.setting.workers)
    inside = () if entry is None else _points(entry)
    measured = 1 if entry is None else entry.setting.workers
    latency_s = ring_latency(inside) if inside else 0.0
    where = "of one device" if in_host == 1 else f"measured over {measured} workers"
    note = (
        f"{operation} over {setting.workers} workers: by the laws of rings and trees from hosts "
        f"{where}, and the cluster as described ({'; '.join(str(c.level) for c in crossed)})"
    )
    points = points_between_hosts(operation, setting.workers, crossed, inside, measured, latency_s)
    return CostTable(points, 0.0, 1.0, 1.0, note)


def ring_latency(points: Sequence[Point]) -> float:
    """Seconds of a size table that do not depend on the size: least squares of relative errors.

    Source: t = a + b S; weights 1 / t^2, because small sizes tell the latency and large ones would
        drown them. Never more than the smallest measured time, never negative.
    """
    least = min(seconds for _, seconds in points)
    if len(points) < 2:
        return least
    weights = [1.0 / (t * t) for _, t in points]
    weighted = [(w, s, t) for w, (s, t) in zip(weights, points, strict=True)]
    mean_s = sum(w * s for w, s, _ in weighted) / sum(weights)
    mean_t = sum(w * t for w, _, t in weighted) / sum(weights)
    spread = sum(w * (s - mean_s) ** 2 for w, s, _ in weighted)
    slope = sum(w * (s - mean_s) * (t - mean_t) for w, s, t in weighted) / spread
    # A fit may leave the range of what was measured where small sizes are slow by chance.
    return min(max(mean_t - slope * mean_s, 0.0), least)


def _points(entry: Collective) -> tuple[Point, ...]:
    return tuple((float(p.num_bytes), p.seconds.value) for p in entry.table)


def overlap_slowdown(
    machine: Machine, setting: Setting, kernels_s: Sequence[float], sync: Sync
) -> tuple[dict[Lane, float], str]:
    """How much computing and communicating hinder each other, and what was assumed about it.

    Args:
        machine: Its overlaps are read, of those at one setting the one measured with kernels of about the
            length that one has which is running at a moment.
        setting: How the device is shared.
        kernels_s: Seconds of each kernel that communication runs beside.
        sync: Copies hinder nobody.
    """
    if not uses_kernels(sync):
        return {}, ""
    known: dict[Setting, list[Overlap]] = {}
    for entry in machine.overlaps:
        known.setdefault(entry.setting, []).append(entry)
    nearest = nearest_setting(known, setting)
    if nearest is None:
        return {}, (
            "overlap was not measured: assumed that computing and communicating do not slow each other"
        )
    total_s = sum(kernels_s)
    # Weighted by time: a moment picked at random falls into a long kernel more often than into a short one.
    usual_s = sum(length**2 for length in kernels_s) / total_s if total_s else 0.0
    entry = min(known[nearest], key=partial(_distance, usual_s))
    compute, communication = entry.slowdowns()
    slowdown: dict[Lane, float] = {"compute": compute, "communication": communication}
    if nearest == setting:
        return slowdown, ""
    return slowdown, f"overlap at {setting} was not measured: assumed as at {nearest}"


def overlap_gain(machine: Machine, setting: Setting) -> float | None:
    """What computing and communicating at once do over the same one after the other.

    Of the setting that is most like it; None where it was not measured, as on GPUs. See `Overlap`.
    """
    known = {entry.setting: entry.gain for entry in machine.overlaps if entry.gain is not None}
    nearest = nearest_setting(known, setting)
    return None if nearest is None else known[nearest].value


def _distance(kernel_s: float, entry: Overlap) -> float:
    """How unlike two lengths of kernels are: the logarithm of their ratio."""
    if entry.kernel is None or not kernel_s:
        return 0.0
    return abs(math.log(entry.kernel.value / kernel_s))
