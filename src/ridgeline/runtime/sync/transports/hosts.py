"""Which workers share a host: found from what each says of its own, or given."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from ridgeline.synchronisation.placed import parted
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def hosts_of(world: World, local: int = 0) -> list[list[int]]:
    """Positions along the data axis by host.

    Args:
        world: This worker's place.
        local: How many consecutive workers share a host; 0 finds out which do.

    Cost: Finding out takes one exchange between all workers, which waits for the device.
    """
    if local:
        return parted(world.axis_size("data"), local)
    return by_host(gather_bytes(_name(), world, "data"))


def by_host(names: Sequence[bytes]) -> list[list[int]]:
    """Positions by host, from the name that each worker has for its own."""
    hosts: dict[bytes, list[int]] = {}
    for position, name in enumerate(names):
        hosts.setdefault(name, []).append(position)
    return list(hosts.values())


def _name() -> bytes:
    """What distinguishes this host: its name, its boot, and which launcher started how many workers.

    Network namespaces of one machine share a boot; they differ by name or by launcher.
    """
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""
    told = (os.environ.get(name, "") for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE"))
    return "\n".join((platform.node(), boot, *told)).encode()
