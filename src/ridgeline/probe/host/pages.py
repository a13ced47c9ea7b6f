"""What large pages are worth where memory is read at random: the same walk in small ones and in large."""

import mmap
from pathlib import Path

from ridgeline import units
from ridgeline.machine.microarchitecture import PageLoads, Pages
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.host.memory_levels import SHORT_S, Sample, Walked
from ridgeline.probe.host.processors import text_of
from ridgeline.probe.host.strides import timed_at_random
from ridgeline.probe.turns import in_turns, ratio

ROUNDS, LEAST_S = 101, 4.0
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
ENOUGH = 0.9
"""Share of what is walked through that must lie in large pages."""


def measure_pages(num_bytes: int, settings: Path = SETTINGS) -> Pages:
    """Seconds of loads at random, in small pages and in large.

    `num_bytes`, a power of two, are walked through in each.

    Raises:
        MachineError: there is no C compiler to make the loops with.

    Cost: one core for about 9 s, and twice so much memory.
    """
    with Walked(num_bytes, large_pages=False) as small:
        # Before the second walk: only the growth belongs to it.
        before = small.large_page_bytes
        with Walked(num_bytes, like=small) as large:
            reason = refusal(num_bytes, before, large.large_page_bytes, settings)
            # A walk that lies in small pages after all would be compared with its like.
            walks = {"small": small} if reason else {"small": small, "large": large}
            loops: dict[tuple[str, str], Sample] = {}
            for size, walked in walks.items():
                loops["waiting", size] = walked.timed_access(SHORT_S)
                loops["independent", size] = timed_at_random(walked, num_bytes)
            found = in_turns(loops, ROUNDS, LEAST_S)
    size = text_of(settings / "hpage_pmd_size")
    return Pages(
        num_bytes=num_bytes,
        small_page_bytes=mmap.PAGESIZE,
        large_page_bytes=int(size) if size.isdecimal() and not reason else None,
        waiting=_loads(found["waiting", "small"], found.get(("waiting", "large"))),
        independent=_loads(found["independent", "small"], found.get(("independent", "large"))),
        reason=reason,
    )


def _loads(small: tuple[float, ...], large: tuple[float, ...] | None) -> PageLoads:
    in_small = Sampled.measured(small, "s")
    if large is None:
        return PageLoads(small=in_small)
    return PageLoads(small=in_small, large=Sampled.measured(large, "s"), gain=ratio(small, large))


def refusal(num_bytes: int, before: int | None, after: int | None, settings: Path) -> str:
    """Why what was asked for in large pages is not there; empty where it is.

    `before` and `after` are bytes of this process in large pages; None where the system does not tell.
    """
    if before is None or after is None:
        return "the system does not say what lies in large pages"
    if after - before >= ENOUGH * num_bytes:
        return ""
    enabled = text_of(settings / "enabled")
    if not enabled:
        return "this system has no transparent large pages"
    return (
        f"of {units.num_bytes(num_bytes)} that were asked for in large pages the system gave "
        f"{units.num_bytes(max(0, after - before))} ({settings / 'enabled'}: {enabled})"
    )
