"""Collectives over more devices than a host has: the measured host, and the links of a described cluster."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from ridgeline.laws.collectives import (
    OVER_TREES,
    CollectiveOperation,
    bus_bandwidth_factor,
    num_rounds,
)
from ridgeline.laws.curves import Point, table_seconds
from ridgeline.machine.cluster import Crossing

SIZES = tuple(float(4**power) for power in range(5, 16))
"""Bytes, 1 KiB to 1 GiB: what a table of seconds is made for where nothing was measured."""


def points_between_hosts(
    operation: CollectiveOperation,
    workers: int,
    crossed: Sequence[Crossing],
    inside: Sequence[Point],
    measured: int,
    latency_s: float,
) -> tuple[Point, ...]:
    """(bytes, seconds) of an operation over devices that do not fit into one host.

    Whatever the algorithm, bytes go through every link of a ring once, which enters and leaves each host and
    rack once, so the link of which others leave the least decides. A ring's messages wait for one another all
    around; over trees they wait for one way up and, for an all-reduce, one down. The faster of both is taken,
    as by NCCL.

    Args:
        operation: What is done.
        workers: Over how many devices.
        crossed: The levels that are left, at least one; see `cluster.crossings`.
        inside: (bytes, seconds) as measured inside of a host; empty where one device is a host.
        measured: Over how many devices that was.
        latency_s: Of that, what does not depend on the size.

    Source: Patarasuk, Yuan 2009 for the ring; Sanders, Speck, Traeff 2009 for trees (see `laws`); an
        all-to-all sends from each place what its devices have for those elsewhere.
    """
    rounds = num_rounds(operation)
    # What the table's latency says of one message between neighbours in a host.
    hop_s = latency_s / (rounds * (measured - 1)) if measured > 1 else 0.0
    hosts, in_host = crossed[0].places, crossed[0].devices
    # As many hops leave a host as there are hosts; all others stay inside.
    ring_s = rounds * ((workers - hosts) * hop_s + _around(crossed))
    waits = [ring_s]
    if operation in OVER_TREES:
        waits.append(rounds * ((in_host - 1) * hop_s + _upwards(crossed)))
    scale = 0.0
    if measured > 1:
        inside_factor = bus_bandwidth_factor(operation, measured)
        scale = bus_bandwidth_factor(operation, workers) / inside_factor
    # At the sizes of the host's table, so that its curve shows through.
    sizes = [num_bytes for num_bytes, _ in inside] or SIZES
    links_s = max(_link_s(operation, workers, one) for one in crossed)
    found: list[Point] = []
    for num_bytes in sizes:
        moving_s = 0.0
        if inside:
            # The latency is taken off: that of the larger ring or tree is added below.
            moving_s = scale * max(0.0, table_seconds(inside, num_bytes) - latency_s)
        # Bytes inside hosts and between them move at the same time, so the slower of both counts.
        found.append((num_bytes, min(waits) + max(moving_s, num_bytes * links_s)))
    return tuple(found)


def _around(crossed: Sequence[Crossing]) -> float:
    """Seconds of a message's way once around a ring, which changes place as seldom as it can."""
    return sum((places - further) * latency_s for places, further, latency_s in _levels(crossed))


def _upwards(crossed: Sequence[Crossing]) -> float:
    """Seconds from the leaves of a binary tree to its root, level by level."""
    return sum(
        math.ceil(math.log2(places / further)) * latency_s
        for places, further, latency_s in _levels(crossed)
    )


def _levels(crossed: Sequence[Crossing]) -> Iterator[tuple[int, int, float]]:
    """Of each level the places in use, those of the level around it, and the latency between them."""
    places = [*(one.places for one in crossed), 1]
    for (inner, outer), one in zip(pairwise(places), crossed, strict=True):
        yield inner, outer, one.level.latency_s


def _link_s(operation: CollectiveOperation, workers: int, crossing: Crossing) -> float:
    """Seconds in which the link of a place carries what goes out of it, a byte of payload, beside others.

    This job's flow passes the links of all levels, others' one of them each: then the fair rate over all of
    them is the least of what each would leave it alone.
    """
    out = bus_bandwidth_factor(operation, workers)
    if operation == "all_to_all":
        inside = min(crossing.devices, workers)
        out = inside * (workers - inside) / workers
    return out / crossing.level.share_bytes_per_s
