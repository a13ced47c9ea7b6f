"""Which stair stands for which level of memory."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.experiments.memory.result import Latency, Stair
from ridgeline.probe.memory_levels import Cache

SOURCE = "Dive into Deep Learning, 12.4 (its table of common latencies, after E. Eshelman)"
TEXTBOOK_S = {1: 1.5e-9, 2: 5e-9, 3: 16e-9}
SMALLEST = 4 << 10
MEMORY_S = 100e-9
"""To send an address and set up a transfer."""
BURST_S = 0.2e-9
"""Each further transfer of 64 bits."""


def sizes(caches: Sequence[Cache], most_bytes: int, *, quick: bool) -> tuple[int, ...]:
    """The sizes to walk through: powers of two, up to four times the largest cache if there is room.

    Args:
        caches: Of the core.
        most_bytes: That may be taken.
        quick: Every second power only, and those that stand for levels.
    """
    largest = max((cache.num_bytes for cache in caches), default=64 << 20)
    last = max(1 << 16, min(4 * largest, most_bytes))
    powers = [1 << power for power in range(SMALLEST.bit_length() - 1, last.bit_length())]
    kept = powers[::2] if quick else powers
    wanted = {size for size in (inside(c.num_bytes) for c in caches) if SMALLEST <= size <= last}
    return tuple(sorted({*kept, powers[-1], *wanted}))


def inside(num_bytes: int) -> int:
    """The largest power of two that takes at most half of a cache: the rest is what others need."""
    return 1 << (max(1, num_bytes // 2).bit_length() - 1)


def level_latencies(caches: Sequence[Cache], stairs: Sequence[Stair]) -> list[Latency]:
    """A hit in each cache, and what main memory costs by itself and in a burst."""
    by_size = {stair.num_bytes: stair for stair in stairs}
    found = []
    below = 0
    for cache in caches:
        stair = by_size.get(inside(cache.num_bytes))
        title = f"load that hits L{cache.level}"
        if stair is None or stair.num_bytes <= below:
            reason = "no set that only this cache holds was walked through"
            found.append(Latency(name=title, textbook_s=TEXTBOOK_S.get(cache.level), reason=reason))
            continue
        found.append(
            Latency(
                name=title,
                textbook_s=TEXTBOOK_S.get(cache.level),
                measured=stair.access_s,
                how=f"{units.num_bytes(stair.num_bytes)} in random order",
            )
        )
        below = cache.num_bytes
    last = stairs[-1]
    if last.num_bytes < 2 * below:
        walked, held = units.num_bytes(last.num_bytes), units.num_bytes(below)
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
