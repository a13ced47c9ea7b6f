"""Options that say where workers are: rings through all of them, and how many share a host."""

from collections.abc import Sequence

from ridgeline.errors import PlanError
from ridgeline.synchronisation.entries import Option, Options
from ridgeline.synchronisation.rings import read

ORDERS = Option("orders", str, "", names_workers=True)
"""Rings as `rings.written` says them; empty: once around, and once back."""
LOCAL = Option("local", int, 0, least=0)
"""How many consecutive workers share a host; 0 finds out, which only they can."""


def orders_objection(workers: int, options: Options) -> str:
    """Why rings are none through so many workers; empty where they are, and for one, who sends nothing."""
    if workers == 1 or not options[ORDERS.name]:
        return ""
    try:
        read(str(options[ORDERS.name]), workers)
    except PlanError as error:
        return str(error)
    return ""


def local_objection(workers: int, options: Options) -> str:
    """Why so many workers of a host gain nothing; empty where they do, for one, and where they find out."""
    local = int(options[LOCAL.name])
    if workers == 1 or not local:
        return ""
    return hosts_objection([len(host) for host in parted(workers, local)])


def hosts_objection(counts: Sequence[int]) -> str:
    """Why there is nothing to gain inside hosts, or between them; empty where there is."""
    advice = "use sync.algorithm='all_reduce', or say options={'local': workers of a host}"
    if len(counts) == 1 or max(counts) == 1:
        got = f"all {counts[0]} on one host" if len(counts) == 1 else "one on each"
        return (
            "wanted several workers on each of several hosts for sync.algorithm='hierarchical', got "
            f"{got}; {advice}"
        )
    if len(set(counts)) > 1:
        return (
            "wanted as many workers on each host for sync.algorithm='hierarchical', got "
            f"{', '.join(map(str, counts))}; {advice}"
        )
    return ""


def parted(size: int, local: int) -> list[list[int]]:
    """Positions by host, where so many consecutive ones share one; the last may have fewer."""
    return [[*range(begin, min(begin + local, size))] for begin in range(0, size, local)]
