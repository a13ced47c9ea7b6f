"""Seconds of collective operations and of a parameter server, from bytes, bandwidth and latency.

`bandwidth_bytes_per_s` is one direction of what joins a worker to the others; links are full duplex.
`latency_s` is paid once per operation, `hop_s` for every message that must wait for another.
"""

import math
from typing import Literal, get_args

from ridgeline.errors import LawError
from ridgeline.laws.arguments import check

CollectiveOperation = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"
]

AT_MOST: dict[CollectiveOperation, CollectiveOperation] = dict.fromkeys(
    ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all"), "all_reduce"
)
"""Operation to another one that costs no less, for the same payload and workers.

Source: an all-reduce is a reduce-scatter and an all-gather, or a reduce and a broadcast; an all-to-all sends
what a reduce-scatter sends.
"""


OVER_TREES: tuple[CollectiveOperation, ...] = ("all_reduce", "broadcast")
"""Operations that libraries also run over trees, where messages are short and workers are many."""


def num_rounds(operation: CollectiveOperation) -> int:
    """How often data goes past all workers: twice for an all-reduce, which first reduces, then gathers."""
    return 2 if operation == "all_reduce" else 1


def bus_bandwidth_factor(operation: CollectiveOperation, workers: int) -> float:
    """Bytes that cross each worker's link per byte of payload.

    Payload divided by time is the algorithm's bandwidth; times this factor it is the bus bandwidth,
    which can be compared with the link whatever the operation and the number of workers.

    Args:
        operation: `all_reduce` moves 2 (n-1)/n, `reduce_scatter`, `all_gather` and `all_to_all`
            (n-1)/n, `broadcast` and `reduce` 1. For the scattering and gathering ones the payload is
            the whole tensor, not a worker's share.
        workers: Number of workers, at least 1; a worker alone moves nothing.

    Raises:
        LawError: `workers` is below 1, or the operation is none of these.

    Source: nccl-tests, doc/PERFORMANCE.md.

    Example:
        >>> bus_bandwidth_factor("all_reduce", 8)
        1.75
    """
    known = get_args(CollectiveOperation)
    # Words come from files and scripts, too, which no type checker has read.
    if operation not in known:
        raise LawError(
            f"wanted an operation out of {', '.join(known)}, got {operation!r}; name one of them"
        )
    check("workers", workers, least=1)
    if workers == 1:
        return 0.0
    if operation in ("broadcast", "reduce"):
        return 1.0
    once = (workers - 1) / workers
    return 2.0 * once if operation == "all_reduce" else once


def ring_all_reduce_seconds(
    num_bytes: float,
    workers: int,
    bandwidth_bytes_per_s: float,
    *,
    latency_s: float = 0.0,
    hop_s: float = 0.0,
) -> float:
    """Seconds to sum a tensor over a ring: reduce-scatter, then all-gather.

    Args:
        num_bytes: Bytes of the tensor on each worker.
        workers: Number of workers; 1 costs nothing.
        bandwidth_bytes_per_s: One direction of a worker's link.
        latency_s: Paid once.
        hop_s: Paid 2 (n-1) times.

    Raises:
        LawError: a number is out of range.

    Source: Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        JPDC 69(2), 2009: 2 (n-1)/n * S / B.

    Example:
        >>> ring_all_reduce_seconds(1e9, 4, 1e9)
        1.5
    """
    bandwidth, hops = bandwidth_bytes_per_s, 2 * _others(workers)
    return _seconds("all_reduce", num_bytes, workers, bandwidth, latency_s, hops, hop_s)


def tree_all_reduce_seconds(
    num_bytes: float,
    workers: int,
    bandwidth_bytes_per_s: float,
    *,
    latency_s: float = 0.0,
    hop_s: float = 0.0,
) -> float:
    """Seconds to sum a tensor over two complementary, pipelined binary trees: up, then down.

    Against the ring it moves slightly more but waits for 2 log2(n) instead of 2 (n-1) messages.

    Args:
        num_bytes: Bytes of the tensor on each worker.
        workers: Number of workers; 1 costs nothing.
        bandwidth_bytes_per_s: One direction of a worker's link.
        latency_s: Paid once.
        hop_s: Paid 2 ceil(log2 n) times.

    Raises:
        LawError: a number is out of range.

    Source: Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
        scan", Parallel Computing 35(12), 2009.

    Example:
        >>> tree_all_reduce_seconds(1e9, 4, 1e9, hop_s=0.25)
        3.0
    """
    # Up and down each move the whole tensor: twice a broadcast's traffic.
    # Half the latency each way, as it is paid once for both.
    bandwidth, hops = bandwidth_bytes_per_s, _tree_depth(workers)
    half_s = check("latency_s", latency_s, least=0.0) / 2
    return 2 * _seconds("broadcast", num_bytes, workers, bandwidth, half_s, hops, hop_s)


def reduce_scatter_seconds(
    num_bytes: float,
    workers: int,
    bandwidth_bytes_per_s: float,
    *,
    latency_s: float = 0.0,
    hop_s: float = 0.0,
) -> float:
    """Seconds until each worker has its share of the sum of a tensor, over a ring.

    Args:
        num_bytes: Bytes of the whole tensor on each worker.
        workers: Number of workers; 1 costs nothing.
        bandwidth_bytes_per_s: One direction of a worker's link.
        latency_s: Paid once.
        hop_s: Paid n-1 times.

    Raises:
        LawError: a number is out of range.

    Source: first half of the ring all-reduce, Patarasuk, Yuan 2009.

    Example:
        >>> reduce_scatter_seconds(1e9, 4, 1e9)
        0.75
    """
    bandwidth, hops = bandwidth_bytes_per_s, _others(workers)
    return _seconds("reduce_scatter", num_bytes, workers, bandwidth, latency_s, hops, hop_s)


def all_gather_seconds(
    num_bytes: float,
    workers: int,
    bandwidth_bytes_per_s: float,
    *,
    latency_s: float = 0.0,
    hop_s: float = 0.0,
) -> float:
    """Seconds until each worker has all shares of a tensor, over a ring.

    Args:
        num_bytes: Bytes of the whole, gathered tensor.
        workers: Number of workers; 1 costs nothing.
        bandwidth_bytes_per_s: One direction of a worker's link.
        latency_s: Paid once.
        hop_s: Paid n-1 times.

    Raises:
        LawError: a number is out of range.

    Source: second half of the ring all-reduce, Patarasuk, Yuan 2009.

    Example:
        >>> all_gather_seconds(1e9, 4, 1e9)
        0.75
    """
    bandwidth, hops = bandwidth_bytes_per_s, _others(workers)
    return _seconds("all_gather", num_bytes, workers, bandwidth, latency_s, hops, hop_s)


def broadcast_seconds(
    num_bytes: float,
    workers: int,
    bandwidth_bytes_per_s: float,
    *,
    latency_s: float = 0.0,
    hop_s: float = 0.0,
) -> float:
    """Seconds until all workers have the tensor of one, over a pipelined tree.

    Args:
        num_bytes: Bytes of the tensor.
        workers: Number of workers; 1 costs nothing.
        bandwidth_bytes_per_s: One direction of a worker's link.
        latency_s: Paid once.
        hop_s: Paid ceil(log2 n) times.

    Raises:
        LawError: a number is out of range.

    Source: Sanders, Speck, Traeff 2009.

    Example:
        >>> broadcast_seconds(1e9, 4, 1e9)
        1.0
    """
    bandwidth, hops = bandwidth_bytes_per_s, _tree_depth(workers)
    return _seconds("broadcast", num_bytes, workers, bandwidth, latency_s, hops, hop_s)


def parameter_server_seconds(
    num_bytes: float,
    workers: int,
    bandwidth_bytes_per_s: float,
    *,
    servers: int = 1,
    colocated: bool = False,
    latency_s: float = 0.0,
) -> float:
    """Seconds for every worker to push its gradients and pull the parameters, both pipelined.

    The parameters are spread evenly over the servers. With a server beside every worker it takes as
    long as a ring: what a parameter server adds is freedom (asynchrony, spare hosts), not speed.

    Args:
        num_bytes: Bytes of the gradients of one worker (and of the parameters).
        workers: Number of workers, at least 1.
        bandwidth_bytes_per_s: One direction of the link of a host.
        servers: Number of servers; at most `workers` when they share the workers' hosts.
        colocated: Whether the servers run on the workers' hosts and share their links.
        latency_s: Paid twice, for the push and for the pull.

    Raises:
        LawError: a number is out of range.

    Source: Jiang et al., "A unified architecture for accelerating distributed DNN training in
        heterogeneous GPU/CPU clusters" (BytePS), OSDI 2020, section 2.

    Example:
        >>> parameter_server_seconds(1e9, 4, 1e9), parameter_server_seconds(1e9, 4, 1e9, servers=4)
        (4.0, 1.0)
    """
    check("num_bytes", num_bytes, least=0.0)
    check("workers", workers, least=1)
    check("servers", servers, least=1, most=workers if colocated else None)
    bandwidth = check("bandwidth_bytes_per_s", bandwidth_bytes_per_s, above=0.0)
    check("latency_s", latency_s, least=0.0)
    if not colocated:
        # With more servers than workers each worker's own link is the limit.
        return max(1.0, workers / servers) * num_bytes / bandwidth + 2 * latency_s
    if workers == 1:
        return 0.0
    # A host with a server sends its own pushes to the other servers and its share to the other workers.
    busiest = (workers + servers - 2) / servers
    # Hosts without a server send all their bytes, as none of those stay at home.
    if servers < workers:
        busiest = max(busiest, 1.0)
    return busiest * num_bytes / bandwidth + 2 * latency_s


def _seconds(
    operation: CollectiveOperation,
    num_bytes: float,
    workers: int,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    hops: int,
    hop_s: float,
) -> float:
    factor = bus_bandwidth_factor(operation, workers)
    check("num_bytes", num_bytes, least=0.0)
    check("bandwidth_bytes_per_s", bandwidth_bytes_per_s, above=0.0)
    check("latency_s", latency_s, least=0.0)
    check("hop_s", hop_s, least=0.0)
    if workers == 1:
        return 0.0
    # Free hops cost nothing, however many there are: infinity times 0 would be no number.
    waiting_s = hops * hop_s if hop_s else 0.0
    return factor * num_bytes / bandwidth_bytes_per_s + latency_s + waiting_s


def _others(workers: int) -> int:
    # Asked for first: what is no number has no predecessor.
    check("workers", workers, least=1)
    return workers - 1


def _tree_depth(workers: int) -> int:
    return math.ceil(math.log2(check("workers", workers, least=1)))
