"""Load by others while something is measured: the system's counters before and after, and what they tell.

/proc/stat counts the time of each processor by what it did, and the time that the host of a virtual machine
gave to others (`steal`). What this process and its children used is known from their own clocks; the rest
were others.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from ridgeline.machine import Ceiling
from ridgeline.machine.host_load import HostLoad
from ridgeline.probe.host.control_groups import ROOT, Periods, cpu_periods
from ridgeline.probe.host.processors import text_of

LISTENED_S = 0.3
"""To tell whether a host is quiet: some thirty ticks of each processor."""
_COLUMNS = 8
"""user nice system idle iowait irq softirq steal; guests are counted as user. Source: proc_stat(5)."""
_IDLE, _WAITING, _STOLEN = 3, 4, 7


class Processors(NamedTuple):
    """Seconds of processors since the system started: busy, taken by the host, and all together."""

    busy_s: float
    stolen_s: float
    whole_s: float


class Counters(NamedTuple):
    """What is counted at one moment; None where the system does not count it."""

    own_s: float
    processors: Processors | None
    periods: Periods | None


def processors(text: str, cores: Collection[int], ticks_per_s: float) -> Processors | None:
    """Seconds of the cores that this process may use; None where the system reports none of them.

    The text is that of /proc/stat, in ticks; the system's other cores do not disturb.
    """
    found: list[list[float]] = []
    for line in text.splitlines():
        name, *numbers = line.split() or [""]
        if name.removeprefix("cpu").isdecimal() and int(name.removeprefix("cpu")) in cores:
            ticks = [int(number) for number in numbers[:_COLUMNS]]
            # Older kernels have fewer columns.
            found.append([*ticks, *[0] * (_COLUMNS - len(ticks))])
    if not found:
        return None
    sums = [sum(column) / ticks_per_s for column in zip(*found, strict=True)]
    whole_s = sum(sums)
    # Waiting for a drive leaves a core to whoever wants it, so it is not busy.
    return Processors(
        whole_s - sums[_IDLE] - sums[_WAITING] - sums[_STOLEN], sums[_STOLEN], whole_s
    )


def between(before: Counters, after: Counters, ceilings: Sequence[Ceiling] = ()) -> HostLoad:
    """What others took between two moments.

    Samples of ceilings that spread tell of load that nobody counts.
    """
    others = stolen = throttled = spread = None
    first, last = before.processors, after.processors
    if first is not None and last is not None and last.whole_s > first.whole_s:
        whole_s = last.whole_s - first.whole_s
        # What this process and its children used is no load by others.
        busy_s = last.busy_s - first.busy_s - (after.own_s - before.own_s)
        others = min(max(busy_s / whole_s, 0.0), 1.0)  # both are counted in ticks
        stolen = min(max((last.stolen_s - first.stolen_s) / whole_s, 0.0), 1.0)
    if before.periods is not None and after.periods is not None:
        number = after.periods.number - before.periods.number
        stood = after.periods.throttled - before.periods.throttled
        # No period within a short time means no time in which anything could be throttled.
        throttled = min(max(stood / number, 0.0), 1.0) if number > 0 else 0.0
    if ceilings:
        spread = statistics.median(ceiling.rate.spread for ceiling in ceilings)
    return HostLoad(others=others, stolen=stolen, throttled=throttled, spread=spread)


def counters(root: Path = ROOT, *, own_s: float | None = None) -> Counters:
    """The counters now.

    `own_s` are seconds that are nobody else's; None: those of this process and its children.

    Cost: Reads some ten small files, and one for each child.
    """
    tell = getattr(os, "sched_getaffinity", None)
    cores = range(os.cpu_count() or 1) if tell is None else tell(0)
    return Counters(
        own_seconds() if own_s is None else own_s,
        processors(text_of(root / "proc/stat"), cores, _ticks_per_s()),
        cpu_periods(root),
    )


def own_seconds() -> float:
    """Seconds of processors that this process and its children have used, also those that have ended."""
    me, used_s = psutil.Process(), 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            used_s += sum(process.cpu_times()[:4])  # own and ended children's, user and system
    return used_s


def listen(seconds: float = LISTENED_S) -> HostLoad:
    """What others take of this host now.

    Cost: Sleeps for so long.
    """
    before = counters()
    time.sleep(seconds)
    return between(before, counters())


def _ticks_per_s() -> float:
    return float(os.sysconf("SC_CLK_TCK")) if hasattr(os, "sysconf") else 100.0
