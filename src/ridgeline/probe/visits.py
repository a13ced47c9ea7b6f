"""What was measured in several visits, as one; each number says where a repeated measurement will find it."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from ridgeline.laws.repeats import common_drift, relative_drift
from ridgeline.machine import Ceiling, CurvePoint, Quantity, Setting
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.findings import Findings

VISITS = 3
"""To each number, with all others in between: the fewest among which one disturbed visit stands out."""

Build = Callable[[Sequence[Sampled]], Quantity]
"""One number of those that its visits found."""


def combined(parts: Iterable[Sequence[Findings]]) -> Findings:
    """All that was found: numbers of several visits are the medians of all their samples.

    Args:
        parts: For each part of a run what its visits found, one or more; numbers that keep their samples lose
            them. What one visit alone has (a size that others had no time for) counts as well.
    """
    visits = [tuple(part) for part in parts]
    drifts = [_drifts(part) for part in visits]
    every = [drift for mine in drifts for drift in mine]
    found = Findings()
    for part, mine in zip(visits, drifts, strict=True):
        # What is measured in one way drifts alike (memory more than products), but may be a few numbers.
        usual = [common_drift(known, VISITS) for known in (every, mine or every)]
        common = math.hypot(*usual) / math.sqrt(2.0) if every else None
        found += _merged(part, partial(_visited, common))
    return found


def _drifts(part: Sequence[Findings]) -> list[float]:
    """The drift from visit to visit of each number that has one."""
    found: list[float] = []

    def noted(visits: Sequence[Sampled]) -> Quantity:
        drift = relative_drift([statistics.median(each.samples) for each in visits])
        if drift is not None:
            found.append(drift)
        return visits[0]

    _merged(part, noted)
    return found


def _visited(common: float | None, visits: Sequence[Sampled]) -> Quantity:
    return Quantity.visited([each.samples for each in visits], visits[0].unit, common)


def _merged(values: Sequence[Any], build: Build) -> Any:
    """One value of those that the visits found in one place."""
    first = values[0]
    if isinstance(first, Sampled):
        return build(values)
    if isinstance(first, (Quantity, Setting)):
        return first
    if isinstance(first, tuple):
        return tuple(_merged(each, build) for each in _by_key(values))
    if isinstance(first, Ceiling):
        rate = build([value.rate for value in values])
        return msgspec.structs.replace(first, rate=rate, curve=_curve(values))
    if isinstance(first, msgspec.Struct):
        fields = {
            name: _merged([getattr(value, name) for value in values], build)
            for name, field in msgspec.structs.asdict(first).items()
            if isinstance(field, (msgspec.Struct, tuple))
        }
        return msgspec.structs.replace(first, **fields)
    return first


def _by_key(tables: Sequence[tuple[Any, ...]]) -> Iterable[list[Any]]:
    """The entries of several tables that are about the same, in the order in which they first come."""
    found: defaultdict[Hashable, list[Any]] = defaultdict(list)
    for table in tables:
        # Entries that are about the same twice in one table are matched in their order.
        seen: Counter[Hashable] = Counter()
        for entry in table:
            key = _key(entry)
            found[key, seen[key]].append(entry)
            seen[key] += 1
    return found.values()


def _key(entry: Any) -> Hashable:
    """What an entry of a table is about: all of it that was not measured."""
    if not isinstance(entry, msgspec.Struct):
        return entry
    fields = msgspec.structs.astuple(entry)
    return tuple(field for field in fields if isinstance(field, (str, int, Setting)))


def _curve(ceilings: Sequence[Ceiling]) -> tuple[CurvePoint, ...]:
    """The median rate by size."""
    rates: defaultdict[float, list[float]] = defaultdict(list)
    for ceiling in ceilings:
        for point in ceiling.curve:
            rates[point.work].append(point.rate)
    # By size, as `Ceiling` requires; visits may end at different ones.
    return tuple(
        CurvePoint(work=work, rate=statistics.median(rates[work])) for work in sorted(rates)
    )
