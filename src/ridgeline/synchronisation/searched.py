"""Where an algorithm is not compared with others, and why: it cannot be faster there, or it would be unknown.

A reason is shown in the ranking in place of a simulation. An algorithm that is fixed is used all the same.
"""

from collections.abc import Callable


def always(reason: str) -> Callable[[str, int], str]:
    """The same reason on every device and for any number of workers; empty: compared wherever offered."""
    return lambda device, workers: reason


everywhere = always("")
as_the_backend = always("the backend's all-reduce sends the same bytes in as many messages")
"""The ring written out: bytes and messages are those of the backend's own."""


def where_rings_are_short(device: str, workers: int) -> str:
    """Trees wait for 2 ceil(log2 n) messages of the whole payload, rings for 2 (n-1) of shares."""
    if device == "cuda":
        return "NCCL takes its own trees where they are faster"
    # 2 ceil(log2 n) is below 2 (n - 1) from four workers on.
    if workers < 4:
        return f"over {workers} workers a tree waits for no fewer messages than a ring, larger ones"
    return ""


hosts_are_one = always(
    "links inside and between hosts are not measured apart, so its gain is unknown"
)
kernels_are_unmeasured = always("its kernels are not measured, so their time is unknown")
"""Kernels on symmetric memory have no size table, and NCCL's would hide what they are for."""
where_it_won = always("only the plan that won is tried with it, where a GPU replays that")
"""What it spares other kernels is known too roughly to rank all plans; see `Algorithm.is_tried_last`."""
servers_share_links = always(
    "its servers are the workers, so that it sends the bytes of a ring: it gains where some need not "
    "wait for others, and by sparse rows"
)
"""Servers beside the workers: the law of the parameter server is that of the ring there."""
memory_is_what_it_saves = always(
    "it saves memory, not time: the updated parameters travel where no backward pass hides it"
)
"""Parts of the optimizer's state save memory; the parameters come back behind the optimizer, exposed."""


def links_are_shared(device: str, workers: int) -> str:
    """Several rings gain where pairs of workers have links of their own."""
    if device == "cuda":
        return "NCCL finds several rings by itself"
    return "workers share one network, which one ring fills"
