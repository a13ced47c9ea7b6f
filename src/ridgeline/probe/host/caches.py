"""The caches near a core, as the system describes them."""

from pathlib import Path
from typing import NamedTuple

from ridgeline.probe.host.processors import text_of


class Cache(NamedTuple):
    """A cache of core 0 that holds data, as the system describes it."""

    level: int
    num_bytes: int


def caches(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> tuple[Cache, ...]:
    """The caches of core 0, nearest first; none where the system does not tell."""
    found = []
    for folder in sorted(root.glob("index*")):
        kind, level, size = (text_of(folder / name) for name in ("type", "level", "size"))
        # Codes are no data; unified caches hold both.
        if kind != "Instruction" and level.isdecimal() and size:
            scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 1)
            found.append(Cache(int(level), int(size.rstrip("KMG")) * scale))
    return tuple(sorted(found))
