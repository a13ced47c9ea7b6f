"""Which stair stands for which level of memory."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.experiments.memory.result import Latency
from ridgeline.machine.stairs import Stair
from ridgeline.probe.host.caches import Cache
from ridgeline.probe.host.staircase import stand_ins

SOURCE = "Dive into Deep Learning, 12.4 (its table of common latencies, after E. Eshelman)"
TEXTBOOK_S = {1: 1.5e-9, 2: 5e-9, 3: 16e-9}
MEMORY_S = 100e-9
"""To send an address and set up a transfer."""
BURST_S = 0.2e-9
"""Each further transfer of 64 bits."""


def level_latencies(caches: Sequence[Cache], stairs: Sequence[Stair]) -> list[Latency]:
    """A hit in each cache, and what main memory costs by itself and in a burst."""
    # A quick walk leaves sizes out, and those of some caches may be among them.
    by_size = {stair.num_bytes: stair for stair in stairs}
    found = []
    for cache, size in zip(caches, stand_ins(caches), strict=True):
        stair = by_size.get(size)
        found.append(
            Latency(
                name=f"load that hits L{cache.level}",
                textbook_s=TEXTBOOK_S.get(cache.level),
                measured=None if stair is None else stair.access_s,
                reason="" if stair else f"{units.num_bytes(size)} were not walked through",
                how=f"{units.num_bytes(size)} in random order" if stair else "",
            )
        )
    last, largest = stairs[-1], max((cache.num_bytes for cache in caches), default=0)
    walked = units.num_bytes(last.num_bytes)
    in_random_order = f"{walked} in random order; caches still answer some of it"
    # Below twice the largest cache a good part of the loads would hit that.
    is_memory = last.num_bytes >= 2 * largest
    reason = f"{walked} were walked through, and caches hold {units.num_bytes(largest)}"
    for name, textbook_s, measured, how in (
        ("load from main memory", MEMORY_S, last.access_s, in_random_order),
        ("next word in a burst", BURST_S, last.word_s, "one core, 8 bytes each"),
        ("word of the next line", None, last.line_s, "one core, none waits for another"),
    ):
        found.append(
            Latency(
                name=name,
                textbook_s=textbook_s,
                measured=measured if is_memory else None,
                reason="" if is_memory else reason,
                how=how if is_memory else "",
            )
        )
    return found
