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
    # Below twice the largest cache a good part of the loads would hit that.
    if last.num_bytes < 2 * largest:
        walked, held = units.num_bytes(last.num_bytes), units.num_bytes(largest)
        reason = f"{walked} were walked through, and caches hold {held}"
        return [*found, *(_memory(name, textbook, reason) for name, textbook in _MEMORY)]
    return [
        *found,
        Latency(
            name=_MEMORY[0][0],
            textbook_s=MEMORY_S,
            measured=last.access_s,
            how=f"{units.num_bytes(last.num_bytes)} in random order; caches still answer some of it",
        ),
        Latency(
            name=_MEMORY[1][0],
            textbook_s=BURST_S,
            measured=last.word_s,
            how="one core, 8 bytes each",
        ),
        Latency(name=_MEMORY[2][0], measured=last.line_s, how="one core, none waits for another"),
    ]


_MEMORY = (
    ("load from main memory", MEMORY_S),
    ("next word in a burst", BURST_S),
    ("word of the next line", None),
)


def _memory(name: str, textbook_s: float | None, reason: str) -> Latency:
    return Latency(name=name, textbook_s=textbook_s, reason=reason)
