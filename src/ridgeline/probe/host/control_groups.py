"""What the control groups of this process grant it, in version 1 and version 2, at whatever level."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ridgeline.probe.host.mounts import Mount, mounts
from ridgeline.probe.host.processors import numbers, text_of

ROOT = Path("/")


class Grant(NamedTuple):
    """The least that a group of this process, or one above it, grants, and the file that says so."""

    amount: float
    by: str


class Periods(NamedTuple):
    """Periods of a quota of CPU time since a group was made, and in how many it was used up."""

    number: int
    throttled: int


def cpu_periods(root: Path = ROOT) -> Periods | None:
    """Of the group, of this process's and those above it, that was throttled most; None where none counts.

    Below `root` are `proc` and `sys`.

    Source: cgroup-v2.rst and scheduler/sched-bwc.rst (`cpu.stat`: `nr_periods`, `nr_throttled`).
    """
    found = []
    for folder in _groups("cpu", root):
        lines = (line.split() for line in text_of(folder / "cpu.stat").splitlines())
        counts = {words[0]: int(words[1]) for words in lines if len(words) == 2}
        # A group without a quota counts no periods.
        if counts.get("nr_periods"):
            found.append(Periods(counts["nr_periods"], counts.get("nr_throttled", 0)))
    return max(found, key=lambda periods: periods.throttled, default=None)


def cpu_quota(root: Path = ROOT) -> Grant | None:
    """Cores' worth of CPU time, e.g. 1.5; None where nothing limits it.

    Below `root` are `proc` and `sys`.

    Source: Documentation/admin-guide/cgroup-v2.rst (`cpu.max`), scheduler/sched-bwc.rst (`cpu.cfs_quota_us`).
    """
    found = []
    for folder in _groups("cpu", root):
        words = text_of(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            found.append(Grant(int(words[0]) / int(words[1]), "cgroup cpu.max"))
        quota, period = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal():  # -1: none
            found.append(Grant(int(quota) / int(period), "cgroup cpu.cfs_quota_us"))
    # The narrowest group decides: limits of those above hold as well.
    return min(found, default=None)


def memory_limit(root: Path = ROOT) -> Grant | None:
    """Bytes; None where nothing limits them. A limit above what the host has is none, too: see callers.

    Source: cgroup-v2.rst (`memory.max`), cgroup-v1/memory.rst (`memory.limit_in_bytes`).
    """
    return _least("memory", ("memory.max", "memory.limit_in_bytes"), root)


def process_limit(root: Path = ROOT) -> Grant | None:
    """Processes and threads; None where nothing limits them.

    Source: cgroup-v2.rst and cgroup-v1/pids.rst (`pids.max`).
    """
    return _least("pids", ("pids.max",), root)


def core_set(root: Path = ROOT) -> Grant | None:
    """Number of cores that may be used at all; None where no group says.

    Source: cgroup-v2.rst (`cpuset.cpus.effective`), cgroup-v1/cpusets.rst.
    """
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    found = [
        Grant(count, f"cgroup {name}")
        for folder in _groups("cpuset", root)
        for name in names
        if (count := len(numbers(text_of(folder / name))))
    ]
    return min(found, key=lambda grant: grant.amount, default=None)


def _least(controller: str, names: tuple[str, ...], root: Path) -> Grant | None:
    found = [
        Grant(int(text), f"cgroup {name}")
        for folder in _groups(controller, root)
        for name in names
        if (text := text_of(folder / name)).isdecimal()  # `max`: none
    ]
    return min(found, default=None)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The group of this process and those above it, as far up as they are seen from here.

    Source: cgroups(7): lines of /proc/self/cgroup are `number:controllers:path`, `0::path` for version 2.
    """
    seen = mounts(root)
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mine = [mount for mount in seen if mount.kind == "cgroup2"]
        elif controller in controllers.split(","):
            mine = [one for one in seen if one.kind == "cgroup" and controller in one.options]
        else:
            continue
        for mount in mine:
            top = root / mount.point.relative_to("/")
            below = _below(mount, path)
            # With the groups above, whose limits this one's file does not show.
            yield from (top / part for part in (below, *below.parents))


def _below(mount: Mount, path: str) -> PurePosixPath:
    """A group's place below its mount; where only a part of the hierarchy is seen, that part's top."""
    group = PurePosixPath(path)
    if ".." not in group.parts and group.is_relative_to(mount.root):
        return group.relative_to(mount.root)
    return PurePosixPath()
