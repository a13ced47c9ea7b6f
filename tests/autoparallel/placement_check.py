"""Whether a placement could happen: what its searches are checked with."""

import itertools
from collections.abc import Mapping, Sequence

from ridgeline.autoparallel.graphs.dag import Dag, Edge
from ridgeline.autoparallel.scheduling.placement import Placement
from ridgeline.errors import ScheduleError


def check_placement(
    dag: Dag,
    placement: Placement,
    costs_by_device: Sequence[Sequence[float]],
    edge_bytes: Mapping[Edge, int],
) -> None:
    """Refuse a placement that starts a node before its values are there, or uses a device or link twice.

    Raises:
        ScheduleError: names the nodes, or the device or link.
    """
    arrivals = {(t.node, t.target): t.end for t in placement.transfers}
    device_of, starts, ends = placement.device_of, placement.starts, placement.ends
    for u, v in dag.edges:
        there = ends[u]
        if device_of[u] != device_of[v] and edge_bytes.get((u, v), 0) > 0:
            there = arrivals.get((u, device_of[v]), float("inf"))
        if starts[v] < there:
            raise ScheduleError(
                f"wanted node {v} to start when the value of node {u} is there, at {there:.9g} s, got "
                f"{starts[v]:.9g} s on device {device_of[v]}; add or move the transfer"
            )
    used: dict[str, list[tuple[float, float]]] = {}
    for node, device in enumerate(device_of):
        if starts[node] + costs_by_device[device][node] > ends[node] * (1 + 1e-9):
            raise ScheduleError(
                f"wanted node {node} to run {costs_by_device[device][node]:.9g} s on device {device}, "
                f"got {ends[node] - starts[node]:.9g} s; place it again with these costs"
            )
        used.setdefault(f"device {device}", []).append((starts[node], ends[node]))
    for t in placement.transfers:
        if t.start < ends[t.node]:
            raise ScheduleError(
                f"wanted the value of node {t.node} to leave after {ends[t.node]:.9g} s, got "
                f"{t.start:.9g} s; place it again"
            )
        used.setdefault(f"link {t.source} -> {t.target}", []).append((t.start, t.end))
    for name, spans in used.items():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            if start < end:
                raise ScheduleError(
                    f"wanted one thing at a time on {name}, got one until {end:.9g} s and the next "
                    f"from {start:.9g} s; place it again"
                )
