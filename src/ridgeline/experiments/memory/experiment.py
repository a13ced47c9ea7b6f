"""`run`: walk through memory, read storage, send packets, use a GPU; the textbook's numbers are beside."""

import datetime
from collections.abc import Sequence

from ridgeline.codec import cache_directory
from ridgeline.errors import TaskError
from ridgeline.experiments.contests import Progress, silent
from ridgeline.experiments.memory.gpu import gpu_latencies
from ridgeline.experiments.memory.levels import SOURCE, level_latencies
from ridgeline.experiments.memory.loopback import loopback_latency
from ridgeline.experiments.memory.result import Latency, MemoryExperiment
from ridgeline.experiments.memory.storage import storage_latencies
from ridgeline.machine.stairs import Stair
from ridgeline.probe.host.caches import caches
from ridgeline.probe.host.fingerprint import devices, host
from ridgeline.probe.host.staircase import room_bytes, sizes, stair

PARTS = ("levels", "storage", "loopback", "gpu")
SMALL_PAGES = (
    "the system gave no large pages: beyond a few MiB a part of each load is the search for its address (see "
    "/sys/kernel/mm/transparent_hugepage/enabled)"
)


def run(
    *, quick: bool = False, only: Sequence[str] = (), progress: Progress = silent
) -> MemoryExperiment:
    """What an access costs here, from the nearest cache to a packet and a GPU, beside the textbook's numbers.

    Args:
        quick: Every second size, fewer reads and packets: about 20 s instead of a minute.
        only: Some of `levels`, `storage`, `loopback`, `gpu`; none: all.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: there is no part of a name.
        MachineError: there is no C compiler to make the loops of `levels` with.

    Cost: one core, and memory of four times the largest cache, at most a quarter of what is free.
    """
    unknown = [name for name in only if name not in PARTS]
    if unknown:
        raise TaskError(
            f"wanted parts of the experiment memory, got {unknown[0]!r}; known are {', '.join(PARTS)}"
        )
    parts = only or PARTS
    known = caches()
    stairs: tuple[Stair, ...] = ()
    latencies: list[Latency] = []
    notes = [f"textbook: {SOURCE}"]
    if "levels" in parts:
        stairs = tuple(stair(size, progress) for size in sizes(known, room_bytes(), quick=quick))
        latencies += level_latencies(known, stairs)
        # Where most of it is in small pages, loads also pay for finding addresses.
        if (stairs[-1].large_page_bytes or 0) < stairs[-1].num_bytes // 2:
            notes.append(SMALL_PAGES)
        if not known:
            notes.append(
                "the system does not report the sizes of its caches: the staircase shows them"
            )
    if "storage" in parts:
        progress("memory: reading from storage")
        # Large enough that reads at random meet few places twice.
        size, count = (32 << 20, 64) if quick else (256 << 20, 512)
        latencies += storage_latencies(cache_directory(), size, count)
    if "loopback" in parts:
        progress("memory: sending packets")
        latencies.append(loopback_latency(200 if quick else 2000))
    if "gpu" in parts:
        progress("memory: launching kernels and copying to GPUs")
        latencies += gpu_latencies(50 if quick else 500)
    return MemoryExperiment(
        date=datetime.date.today().isoformat(),
        host=host(),
        devices=devices(),
        is_quick=quick,
        caches={f"L{cache.level}": cache.num_bytes for cache in known},
        stairs=stairs,
        latencies=tuple(latencies),
        notes=tuple(notes),
    )
