"""The staircase of a host's memory: which sizes are walked through, and the profile with what that took."""

from collections.abc import Callable, Sequence

import msgspec
import psutil

from ridgeline import units
from ridgeline.errors import MachineError
from ridgeline.machine import Machine
from ridgeline.machine.stairs import Stair
from ridgeline.probe.fields import forgotten, warned
from ridgeline.probe.host.caches import Cache, caches
from ridgeline.probe.host.fingerprint import memory_bytes
from ridgeline.probe.host.memory_levels import Walked

SMALLEST = 4 << 10
BEYOND = 4
"""Times the size of a cache: a random walk through this much finds little of it there."""
MOST_OF_FREE = 0.25
"""Share of the free memory that may be walked through; making the walk takes the same amount again."""
MOST_BYTES = 2 << 30
PREFIX = "no staircase of memory: "


def with_stairs(
    machine: Machine, keep: Callable[[Machine], Machine], say: Callable[[str], None]
) -> Machine:
    """The profile with a stair for each size that it lacks, kept after each.

    Arguments as of `fields.with_fields`.

    Cost: one core for about 40 s, and memory of four times the largest cache, at most a quarter of what is
        free. Without a C compiler nothing is walked through, and a warning says so.
    """
    known = caches()
    sizes_known = {f"L{cache.level}": cache.num_bytes for cache in known}
    machine = msgspec.structs.replace(forgotten(machine, PREFIX), caches=sizes_known)
    stairs = {stair.num_bytes: stair for stair in machine.stairs}
    missing = [size for size in sizes(known, room_bytes(), quick=False) if size not in stairs]
    for number, size in enumerate(missing, 1):
        try:
            stairs[size] = stair(size, say, f" ({number} of {len(missing)})")
        except MachineError as error:
            return warned(machine, f"{PREFIX}{error}")
        ordered = tuple(stairs[each] for each in sorted(stairs))
        machine = keep(msgspec.structs.replace(machine, stairs=ordered))
    return machine


def stair(num_bytes: int, say: Callable[[str], None], which: str = "") -> Stair:
    """The cost of memory accesses in a walk through `num_bytes`.

    Raises:
        MachineError: there is no C compiler to make the loops with.
    """
    say(f"memory: walking through {units.num_bytes(num_bytes)}{which}")
    with Walked(num_bytes) as walked:
        return Stair(
            num_bytes=num_bytes,
            access_s=walked.access(),
            word_s=walked.word(),
            line_s=walked.line(),
            large_page_bytes=walked.large_page_bytes,
        )


def room_bytes() -> int:
    """The most that may be walked through now, also where a container grants less than the host has."""
    # What is available counts the host's memory, also where a container grants less.
    free = min(psutil.virtual_memory().available, memory_bytes())
    return min(int(MOST_OF_FREE * free), MOST_BYTES)


def sizes(caches: Sequence[Cache], most_bytes: int, *, quick: bool) -> tuple[int, ...]:
    """The sizes to walk through: powers of two, up to four times the largest cache if there is room.

    Quick: every second power only, and those that stand for levels.
    """
    largest = max((cache.num_bytes for cache in caches), default=64 << 20)
    last = max(1 << 16, min(4 * largest, most_bytes))
    powers = [1 << power for power in range(SMALLEST.bit_length() - 1, last.bit_length())]
    kept = powers[::2] if quick else powers
    wanted = {size for size in stand_ins(caches) if SMALLEST <= size <= last}
    return tuple(sorted({*kept, powers[-1], *wanted}))


def stand_in(cache: Cache, below_bytes: int) -> int:
    """The size whose walk stands for hits in a cache: four times what the caches before it hold.

    Most of that misses them. A set near the cache's own size also shows what else is in it, and how long
    addresses are searched for. Where four times is more than half of this cache, it is half.
    """
    half = 1 << (max(1, cache.num_bytes // 2).bit_length() - 1)
    beyond = 1 << (BEYOND * below_bytes - 1).bit_length() if below_bytes else half
    return min(half, beyond)


def stand_ins(caches: Sequence[Cache]) -> tuple[int, ...]:
    """For each cache, nearest first."""
    before = (0, *(cache.num_bytes for cache in caches))
    return tuple(stand_in(cache, below) for cache, below in zip(caches, before, strict=False))
