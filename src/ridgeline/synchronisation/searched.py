"""Where an algorithm is not compared with others, and why: it cannot be faster there, or it would be unknown.

A reason is shown in the ranking in place of a simulation. An algorithm that is fixed is used all the same.
"""


def everywhere(device: str, workers: int) -> str:
    """Compared wherever it is offered."""
    return ""


def as_the_backend(device: str, workers: int) -> str:
    """The ring written out: bytes and messages are those of the backend's own."""
    return "the backend's all-reduce sends the same bytes in as many messages"


def where_rings_are_short(device: str, workers: int) -> str:
    """Trees wait for 2 ceil(log2 n) messages of the whole payload, rings for 2 (n-1) of shares."""
    if device == "cuda":
        return "NCCL takes its own trees where they are faster"
    # 2 ceil(log2 n) is below 2 (n - 1) from four workers on.
    if workers < 4:
        return f"over {workers} workers a tree waits for no fewer messages than a ring, larger ones"
    return ""


def hosts_are_one(device: str, workers: int) -> str:
    """What leaves a host is not measured apart from what stays in it."""
    return "links inside and between hosts are not measured apart, so its gain is unknown"


def links_are_shared(device: str, workers: int) -> str:
    """Several rings gain where pairs of workers have links of their own."""
    if device == "cuda":
        return "NCCL finds several rings by itself"
    return "workers share one network, which one ring fills"


def kernels_are_unmeasured(device: str, workers: int) -> str:
    """Kernels on symmetric memory have no size table, and NCCL's would hide what they are for."""
    return "its kernels are not measured, so their time is unknown"


def where_it_won(device: str, workers: int) -> str:
    """What it spares other kernels is known too roughly to rank all plans; see `Algorithm.is_tried_last`."""
    return "only the plan that won is tried with it, where a GPU replays that"


def servers_share_links(device: str, workers: int) -> str:
    """Servers beside the workers: the law of the parameter server is that of the ring there."""
    return (
        "its servers are the workers, so that it sends the bytes of a ring: it gains where some need not "
        "wait for others, and by sparse rows"
    )


def memory_is_what_it_saves(device: str, workers: int) -> str:
    """Parts of the optimizer's state save memory; the parameters come back behind the optimizer, exposed."""
    return (
        "it saves memory, not time: the updated parameters travel where no backward pass hides it"
    )
