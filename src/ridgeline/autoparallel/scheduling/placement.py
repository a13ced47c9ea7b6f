"""Which node runs on which of several devices, and when what is copied between them.

A value is copied once to each device that needs it, over the link from its device to that one. A link
carries one copy at a time, side by side with computing and with the other links.
"""

import itertools
import statistics
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ridgeline.autoparallel.graphs.dag import Dag, Edge
from ridgeline.errors import ScheduleError

LinkSeconds = Callable[[int, int, float], float]
"""Seconds to copy from a device to another one: `link_seconds(source, target, num_bytes)`."""


class Transfer(NamedTuple):
    """A value copied from one device to another, once whatever number of nodes read it there.

    `num_bytes` is the largest of the edges from `node`; `start` and `end` are seconds.
    """

    node: int
    source: int
    target: int
    num_bytes: int
    start: float
    end: float


class Placement(NamedTuple):
    """Where and when each node runs; made by `place`.

    For each node its device and the seconds at which it starts and ends; copies between devices by start.
    """

    device_of: tuple[int, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    transfers: tuple[Transfer, ...]

    @property
    def makespan(self) -> float:
        """Seconds until everything is done."""
        return max(self.ends, default=0.0)


def place(
    dag: Dag,
    costs_by_device: Sequence[Sequence[float]],
    edge_bytes: Mapping[Edge, int],
    link_seconds: LinkSeconds,
    pinned: Mapping[int, int],
    *,
    spread: Collection[int] | None = None,
) -> Placement:
    """Nodes on the devices on which each ends first, the most urgent ones first.

    The result is never worse than putting everything that is not pinned on one device of `spread`.

    `costs_by_device[device][node]` and `link_seconds` are seconds; an edge without bytes only orders its
    ends. Nodes that are `pinned` must be on a given device, the others on those of `spread`; None: on any.

    Raises:
        ScheduleError: there is no device, costs are missing, or a node is pinned to none of the devices.

    Cost: O(n^2 d) at worst, for n nodes and d devices.

    Source: HEFT (Topcuoglu, Hariri, Wu 2002), insertion based, with mean costs for the upward ranks; links
        are occupied as devices are, which HEFT itself leaves out.
    """
    _check(dag, costs_by_device, pinned)
    devices = tuple(range(len(costs_by_device)) if spread is None else spread)
    sizes: dict[int, int] = {}
    for (u, _), size in edge_bytes.items():
        # One copy serves all readers on a device, so it has to be as large as the largest of them needs.
        sizes[u] = max(sizes.get(u, 0), size)
    ranks = _ranks(dag, costs_by_device, edge_bytes, link_seconds)
    urgent = sorted(range(dag.num_nodes), key=lambda node: (-ranks[node], node))

    def attempt(free: Collection[int]) -> Placement:
        heft = _Heft(dag, costs_by_device, edge_bytes, sizes, link_seconds)
        for node in urgent:
            heft.put(node, (pinned[node],) if node in pinned else free)
        return heft.placement()

    # HEFT is greedy: where copies are dear it may end up behind one device alone.
    found = [attempt(devices), *(attempt((device,)) for device in devices if len(devices) > 1)]
    return min(found, key=lambda placement: placement.makespan)


class _Busy:
    """What a device or link does when: intervals that do not overlap, ascending."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def earliest(self, ready: float, seconds: float) -> float:
        """The first time from `ready` on at which there are `seconds` to spare."""
        spans = self._spans
        index = bisect_left(spans, (ready, ready))
        # The span before may still be running at `ready`; all earlier ones end before it begins.
        start = max(ready, spans[index - 1][1]) if index else ready
        for begin, end in itertools.islice(spans, index, None):
            if start + seconds <= begin:
                break
            start = max(start, end)
        return start

    def add(self, start: float, end: float) -> None:
        if end > start:
            insort(self._spans, (start, end))

    def remove(self, start: float, end: float) -> None:
        if end > start:
            self._spans.remove((start, end))


class _Heft:
    """A placement in the making."""

    def __init__(
        self,
        dag: Dag,
        costs: Sequence[Sequence[float]],
        edge_bytes: Mapping[Edge, int],
        sizes: Mapping[int, int],
        link_seconds: LinkSeconds,
    ) -> None:
        self._costs = costs
        self._edge_bytes = edge_bytes
        self._sizes = sizes
        self._link_seconds = link_seconds
        self._parents = dag.parents()
        self._device_of = [-1] * dag.num_nodes
        self._starts = [0.0] * dag.num_nodes
        self._ends = [0.0] * dag.num_nodes
        self._devices = [_Busy() for _ in costs]
        self._links: dict[Edge, _Busy] = {}
        self._transfers: dict[tuple[int, int], Transfer] = {}

    def put(self, node: int, allowed: Collection[int]) -> None:
        """Run `node` on the device on which it ends first."""

        def end(device: int) -> float:
            start, copies = self._try(node, device)
            # Only tried: what another device would need must not occupy the links.
            self._undo(copies)
            return start + self._costs[device][node]

        # By number where two end together, so that all workers, and all runs, place alike.
        device = min(allowed, key=lambda device: (end(device), device))
        start, copies = self._try(node, device)
        for copy in copies:
            self._transfers[copy.node, copy.target] = copy
        self._device_of[node] = device
        self._starts[node] = start
        self._ends[node] = start + self._costs[device][node]
        self._devices[device].add(start, self._ends[node])

    def placement(self) -> Placement:
        """What was put, when all nodes were."""
        transfers = sorted(self._transfers.values(), key=lambda t: (t.start, t.end, t.node))
        return Placement(
            tuple(self._device_of), tuple(self._starts), tuple(self._ends), tuple(transfers)
        )

    def _try(self, node: int, device: int) -> tuple[float, list[Transfer]]:
        """When `node` could start on `device`, and the copies for that, which occupy their links."""
        ready = 0.0
        copies: list[Transfer] = []
        # In the order in which they end: a copy that is ready earlier takes the link first.
        for parent in sorted(self._parents[node], key=self._ends.__getitem__):
            there = self._ends[parent]
            if self._device_of[parent] != device and self._edge_bytes.get((parent, node), 0) > 0:
                copy = self._transfers.get((parent, device))
                if copy is None:
                    copy = self._copy(parent, device)
                    copies.append(copy)
                there = copy.end
            ready = max(ready, there)
        return self._devices[device].earliest(ready, self._costs[device][node]), copies

    def _copy(self, node: int, target: int) -> Transfer:
        source = self._device_of[node]
        link = self._links.setdefault((source, target), _Busy())
        seconds = self._link_seconds(source, target, self._sizes[node])
        start = link.earliest(self._ends[node], seconds)
        link.add(start, start + seconds)
        return Transfer(node, source, target, self._sizes[node], start, start + seconds)

    def _undo(self, copies: Sequence[Transfer]) -> None:
        for copy in copies:
            self._links[copy.source, copy.target].remove(copy.start, copy.end)


def _ranks(
    dag: Dag,
    costs: Sequence[Sequence[float]],
    edge_bytes: Mapping[Edge, int],
    link_seconds: LinkSeconds,
) -> list[float]:
    """Upward ranks with the mean cost of a node and the mean time of a copy between two devices."""
    pairs = list(itertools.permutations(range(len(costs)), 2))
    means: dict[int, float] = {0: 0.0}

    def copy_seconds(size: int) -> float:
        if size not in means:
            seconds = [link_seconds(a, b, size) for a, b in pairs]
            means[size] = statistics.fmean(seconds) if seconds else 0.0
        return means[size]

    ranks = [0.0] * dag.num_nodes
    children = dag.children()
    # Edges lead from lower numbers to higher ones, so children have their ranks already.
    for u in reversed(range(dag.num_nodes)):
        longest = max(
            (copy_seconds(edge_bytes.get((u, v), 0)) + ranks[v] for v in children[u]), default=0.0
        )
        ranks[u] = statistics.fmean(cost[u] for cost in costs) + longest
    return ranks


def _check(dag: Dag, costs: Sequence[Sequence[float]], pinned: Mapping[int, int]) -> None:
    if not costs or any(len(cost) != dag.num_nodes for cost in costs):
        raise ScheduleError(
            f"wanted the costs of {dag.num_nodes} nodes on at least one device, got "
            f"{[len(cost) for cost in costs]}; give costs_by_device[device][node]"
        )
    for node, device in pinned.items():
        if not 0 <= device < len(costs) or not 0 <= node < dag.num_nodes:
            raise ScheduleError(
                f"wanted pinned nodes below {dag.num_nodes} on devices below {len(costs)}, got node "
                f"{node} on device {device}; pin nodes of this graph to devices that have costs"
            )
