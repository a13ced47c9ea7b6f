"""What this process is granted of its host: by control groups, by its affinity, by the shell's limits."""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.machine.limits import Limit, What
from ridgeline.probe.host.control_groups import (
    ROOT,
    core_set,
    cpu_quota,
    memory_limit,
    process_limit,
)
from ridgeline.probe.host.processors import line_of, numbers, text_of

USUAL_SHARE = 0.5
"""Share of the memory that /dev/shm may take unless somebody says otherwise. Source: tmpfs(5), `size`."""
QUOTA = (
    "workers and threads are planned for {cores}: where more run, all stand still for the rest of a period "
    "once its share is used up"
)
CORES = "workers and threads are planned for {cores:g} at most"
MEMORY = (
    "plans that need more are left out; the kernel kills a process of the group that takes more"
)
SHARED = (
    "loaders' workers die of a bus error, and NCCL does not start, where they need more; give more by docker "
    "run --shm-size or --ipc=host"
)
"""Source: PyTorch's README (Docker image), and Troubleshooting in NVIDIA's user guide of NCCL."""
PROCESSES = "each thread counts, and each worker starts dozens: beyond it no thread starts"
LOCKED = "InfiniBand and other RDMA register memory that counts: there NCCL fails beyond it; lift it there"
"""Source: Troubleshooting in NVIDIA's user guide of NCCL, which has Docker start with `memlock=-1`."""
FILES = (
    "connections of workers and files of loaders count; `ulimit -n` raises it to the second number"
)


def limits(root: Path = ROOT) -> tuple[Limit, ...]:
    """The limits that bite: less than the host has, or a number that a program may come to.

    Below `root` are `proc`, `sys` and `dev`.

    Cost: Reads some twenty small files.
    """
    return (*_cores(root), *_memory(root), *_counts(root))


def _cores(root: Path) -> Iterator[Limit]:
    there = len(numbers(text_of(root / "sys/devices/system/cpu/online"))) or None
    most = there or math.inf
    quota, group = cpu_quota(root), core_set(root)
    if quota is not None and quota.amount < most:
        follows = QUOTA.format(cores=max(1, int(quota.amount)))
        yield Limit(what="cores", granted=quota.amount, whole=there, by=quota.by, follows=follows)
    if group is not None and group.amount < most:
        most = group.amount
        follows = CORES.format(cores=most)
        yield Limit(what="cores", granted=most, whole=there, by=group.by, follows=follows)
    allowed = len(numbers(line_of(root / "proc/self/status", "Cpus_allowed_list:")))
    # Only where it bites further: an affinity often repeats the group's set.
    if 0 < allowed < most < math.inf:
        follows = f"{CORES.format(cores=allowed)}; they were chosen where this process was started"
        yield Limit(what="cores", granted=allowed, whole=there, by="affinity", follows=follows)


def _memory(root: Path) -> Iterator[Limit]:
    words = line_of(root / "proc/meminfo", "MemTotal:").split()
    there = int(words[0]) << 10 if words else None
    most = there or math.inf
    grant = memory_limit(root)
    if grant is not None and grant.amount < most:
        most = grant.amount
        yield Limit(what="memory", granted=most, whole=there, unit="B", by=grant.by, follows=MEMORY)
    shared = root / "dev/shm"
    size = shutil.disk_usage(shared).total if shared.is_dir() else math.inf
    # Half of the memory is what a host has unless somebody lowered it.
    if size < USUAL_SHARE * most < math.inf:
        yield Limit(
            what="shared memory", granted=size, unit="B", by="size of /dev/shm", follows=SHARED
        )


def _counts(root: Path) -> Iterator[Limit]:
    grant = process_limit(root)
    if grant is not None:
        yield Limit(what="processes", granted=grant.amount, by=grant.by, follows=PROCESSES)
    path = root / "proc/self/limits"
    locked, files = (
        line_of(path, name).split() for name in ("Max locked memory", "Max open files")
    )
    if locked and locked[0] != "unlimited":
        yield _raisable("locked memory", locked, unit="B", by="ulimit -l", follows=LOCKED)
    if files and files[0] != "unlimited":
        found = _raisable("open files", files, by="ulimit -n", follows=FILES)
        # Without a second number there is nothing to raise it to.
        follows = FILES if found.whole else FILES.partition(";")[0]
        yield msgspec.structs.replace(found, follows=follows)


def _raisable(what: What, words: list[str], **more: Any) -> Limit:
    """A limit, with the hard one where a process may raise its own to a number above it."""
    whole = None if words[1] in (words[0], "unlimited") else int(words[1])
    return Limit(what=what, granted=int(words[0]), whole=whole, **more)
