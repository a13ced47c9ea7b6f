"""Whether measurements of a machine repeat as they say: every run's numbers in the ranges of every other run.

    python benchmarks/repeated_probes.py                    # ten runs, about 20 s each
    python benchmarks/repeated_probes.py --runs 20 --full   # minutes each
    python benchmarks/repeated_probes.py --profiles a.json b.json c.json

Each run is `ridgeline measure` in a process of its own, with a cache of its own. Of every ordered pair of
runs it is counted how many numbers of the second lie within what the first states: between its quartiles, and
in the range that it gives for a repeated measurement.
"""

import argparse
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from ridgeline import units
from ridgeline.codec import Noun, Value
from ridgeline.experiments.result_files import file_name, say
from ridgeline.machine import Host, Machine, Quantity, Setting

RESULTS = Path(__file__).parent / "results"
ROUNDING = 1e-9
"""Of sums and products on the way to a file, as a share."""


class RepeatedKind(Value, frozen=True, kw_only=True):
    """How numbers of one kind repeat. Shares are of all ordered pairs of runs; the others are medians.

    `range_reach` is half of a stated range, `quartile_reach` half of the quartiles' distance, `between_runs`
    the standard deviation of the runs' medians, all as shares of the median.
    """

    numbers: int
    within_quartiles: float
    within_range: float | None
    quartile_reach: float
    range_reach: float | None
    between_runs: float


class RepeatedProbes(Noun, frozen=True, kw_only=True):
    """What several measurements of a machine say of each other.

    `loads` are the load averages of the system before each run and behind the last: how many processes were
    running or waiting, of all that use it. `others` are the shares of the processors that others used.
    """

    kind: ClassVar[str] = "repeated-probes"

    host: Host
    effort: str
    runs: int
    seconds: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    others: tuple[float | None, ...] = ()
    overall: RepeatedKind
    by_kind: dict[str, RepeatedKind]


class NumberPlace(NamedTuple):
    """Which number of a profile: the field of the profile, and what the entry in it is about."""

    kind: str
    entry: tuple[Any, ...]


def numbers_of(machine: Machine) -> dict[NumberPlace, Quantity]:
    """Every measured number of a profile."""
    found: dict[NumberPlace, Quantity] = {}
    for name in machine.__struct_fields__:
        for entry, number in _numbers(getattr(machine, name), ()):
            if number.source == "measured":
                found[NumberPlace(name, entry)] = number
    return found


def _numbers(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Quantity]]:
    if isinstance(value, Quantity):
        yield path, value
    elif isinstance(value, tuple):
        # By its place where entries are about the same: overlaps of kernels of several lengths.
        seen: dict[tuple[Any, ...], int] = {}
        for part in value:
            key = _about(part)
            seen[key] = seen.get(key, -1) + 1
            yield from _numbers(part, (*path, *key, seen[key]))
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _numbers(getattr(value, name), (*path, name))


def _about(entry: Any) -> tuple[Any, ...]:
    if not isinstance(entry, msgspec.Struct):
        return ()
    fields = (getattr(entry, name) for name in entry.__struct_fields__)
    return tuple(field for field in fields if isinstance(field, (str, int, Setting)))


def compared(machines: Sequence[Machine]) -> tuple[RepeatedKind, dict[str, RepeatedKind]]:
    """How all numbers repeat that every profile has, and those of each kind.

    Args:
        machines: Profiles of one machine, at least two.
    """
    profiles = [numbers_of(machine) for machine in machines]
    places = [place for place in profiles[0] if all(place in each for each in profiles)]
    kinds = dict.fromkeys(place.kind for place in places)
    by_kind = {
        kind: _repeated(profiles, [place for place in places if place.kind == kind])
        for kind in kinds
    }
    return _repeated(profiles, places), by_kind


def _repeated(
    profiles: Sequence[Mapping[NumberPlace, Quantity]], places: Sequence[NumberPlace]
) -> RepeatedKind:
    quartiles: list[bool] = []
    ranges: list[bool] = []
    for one, other in itertools.permutations(profiles, 2):
        for place in places:
            stated, found = one[place], other[place].value
            quartiles.append(_is_within(found, stated.low, stated.high))
            if stated.repeat_low is not None and stated.repeat_high is not None:
                ranges.append(_is_within(found, stated.repeat_low, stated.repeat_high))
    stated = [profile[place] for profile in profiles for place in places if profile[place].value]
    reaches = [each.repeats_within for each in stated]
    known = [reach for reach in reaches if reach is not None]
    spreads = []
    for place in places:
        medians = [profile[place].value for profile in profiles]
        if min(medians) > 0.0:
            spreads.append(statistics.stdev(map(math.log, medians)))
    return RepeatedKind(
        numbers=len(places),
        within_quartiles=statistics.fmean(quartiles),
        within_range=statistics.fmean(ranges) if ranges else None,
        quartile_reach=statistics.median(each.spread / 2 for each in stated),
        range_reach=statistics.median(known) if known else None,
        between_runs=statistics.median(spreads),
    )


def _is_within(value: float, low: float, high: float) -> bool:
    return low * (1.0 - ROUNDING) <= value <= high * (1.0 + ROUNDING)


class MeasuredRun(NamedTuple):
    """A profile, the seconds that it took, and the load average of the system before."""

    machine: Machine
    seconds: float
    load: float


def measured(*, is_full: bool) -> MeasuredRun:
    """A profile by a new process that knows nothing of earlier ones."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="ridgeline-repeated-") as name:
        path = Path(name) / "machine.json"
        command = [sys.executable, "-m", "ridgeline", "measure", "-q", "-o", str(path)]
        begin = time.monotonic()
        subprocess.run(
            [*command, *(["--full"] if is_full else [])],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"XDG_CACHE_HOME": name},
        )
        return MeasuredRun(Machine.load(path), time.monotonic() - begin, load)


def lines_of(result: RepeatedProbes) -> Iterator[str]:
    """The result as a table in Markdown."""
    yield "| Numbers | Count | Within quartiles | Within range | Quartiles | Range | Between runs |"
    yield "|---|---|---|---|---|---|---|"
    for name, row in {**result.by_kind, "all": result.overall}.items():
        within = "" if row.within_range is None else units.percent(row.within_range)
        reach = "" if row.range_reach is None else f"+-{units.percent(row.range_reach)}"
        yield (
            f"| {name} | {row.numbers} | {units.percent(row.within_quartiles)} | {within} | "
            f"+-{units.percent(row.quartile_reach)} | {reach} | {units.percent(row.between_runs)} |"
        )


def main() -> None:
    """Measure again and again, compare, print the table, and keep the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--full", action="store_true", help="run `ridgeline measure --full`")
    parser.add_argument("--profiles", type=Path, nargs="+", help="compare these, measure nothing")
    parser.add_argument("-o", "--output", type=Path, help="default: a file of today in results/")
    asked = parser.parse_args()
    runs: list[MeasuredRun] = []
    if asked.profiles:
        machines = [Machine.load(path) for path in asked.profiles]
    else:
        for number in range(asked.runs):
            runs.append(measured(is_full=asked.full))
            say(f"run {number + 1} of {asked.runs}: {runs[-1].seconds:.1f} s")
        machines = [run.machine for run in runs]
    overall, by_kind = compared(machines)
    loads = [machine.host_load for machine in machines]
    result = RepeatedProbes(
        host=machines[0].host,
        effort=machines[0].effort,
        runs=len(machines),
        seconds=tuple(run.seconds for run in runs),
        loads=(*(run.load for run in runs), os.getloadavg()[0]) if runs else (),
        others=tuple(None if load is None else load.others for load in loads),
        overall=overall,
        by_kind=by_kind,
    )
    print("\n".join(lines_of(result)))
    if asked.output or not asked.profiles:
        name = file_name("repeated_probes", f"{machines[0].host.cores}-core-CPU")
        say(f"result in {result.save(asked.output or RESULTS / name)}")


if __name__ == "__main__":
    main()
