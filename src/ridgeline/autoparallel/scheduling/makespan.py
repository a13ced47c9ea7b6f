"""When the nodes of a schedule run, before anything ran, and what no schedule can beat.

Lanes run their nodes in order. Nodes that run at the same time on one device share it: as long as they fill
it less than once they do not notice each other, beyond that all of them slow down by what is too much. The
model knows nothing of the order in which a device takes up the blocks of two kernels, nor of caches.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ridgeline.autoparallel.graphs.dag import Dag, critical_path
from ridgeline.autoparallel.scheduling.placement import Transfer
from ridgeline.autoparallel.scheduling.schedule import Schedule
from ridgeline.codec import Value


class NodeCost(NamedTuple):
    """Seconds that a node takes alone, and the share (0 .. 1] of the device that it then occupies."""

    seconds: float
    fill: float = 1.0


class Times(NamedTuple):
    """Seconds at which each node starts and ends."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds until everything is done."""
        return max(self.ends, default=0.0)


def run_schedule(costs: Sequence[NodeCost], schedule: Schedule, *, sync_s: float = 0.0) -> Times:
    """When each node starts and ends, where all lanes share one device.

    Args:
        costs: For each node what it costs alone.
        schedule: Who runs where; valid, see `check_schedule`.
        sync_s: Seconds from the end of a node until one that waits for it on another lane can start.

    Cost: O((n + syncs) log n) for n nodes; about 10 us a node.

    Source: processor sharing on a virtual clock, which runs slower the fuller the device is, so that the
        ends of running nodes never change their order (as in fair queueing: Demers, Keshav, Shenker 1989).
    """
    return _Clock(costs, schedule, sync_s).run()


class _Device:
    """Nodes that run now, ordered by when they end on a clock of their own."""

    __slots__ = ("ends", "fill", "now", "virtual")

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []
        self.fill = 0.0
        self.now = 0.0
        self.virtual = 0.0

    def advance(self, now: float) -> None:
        # A device that is not full runs at full speed; beyond that, all that runs slows down alike.
        self.virtual += (now - self.now) / max(1.0, self.fill)
        self.now = now

    def next_end(self) -> float:
        if not self.ends:
            return math.inf
        return self.now + (self.ends[0][0] - self.virtual) * max(1.0, self.fill)


class _Clock:
    def __init__(self, costs: Sequence[NodeCost], schedule: Schedule, sync_s: float) -> None:
        count = len(costs)
        self.costs = costs
        self.sync_s = sync_s
        self.device = _Device()
        self.left = [0] * count
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.next_of = [-1] * count
        for nodes in schedule.nodes_by_lane():
            for before, node in itertools.pairwise(nodes):
                self.next_of[before] = node
                self.left[node] += 1
        for u, v in schedule.syncs:
            self.after[u].append(v)
            self.left[v] += 1
        self.starts = [0.0] * count
        self.ends = [0.0] * count
        self.ready = [0.0] * count
        self.coming = [(0.0, n) for n in schedule.order if not self.left[n]]
        heapq.heapify(self.coming)

    def run(self) -> Times:
        while self.coming or self.device.ends:
            # At the same moment ends come first: they make room before the next node fills the device.
            if self.coming and self.coming[0][0] < self.device.next_end():
                now, node = heapq.heappop(self.coming)
                self._start(node, now)
            else:
                self._finish()
        return Times(tuple(self.starts), tuple(self.ends))

    def _start(self, node: int, now: float) -> None:
        device = self.device
        device.advance(now)
        self.starts[node] = now
        seconds, fill = self.costs[node]
        # On the device's own clock: it never changes, whatever else begins or ends before.
        heapq.heappush(device.ends, (device.virtual + seconds, node))
        device.fill += fill

    def _finish(self) -> None:
        device = self.device
        now = device.next_end()
        device.advance(now)
        end, node = heapq.heappop(device.ends)
        # Exactly, so that rounding does not let nodes that end together end one after another.
        device.virtual = end
        # Nothing left over from rounding where nothing runs.
        device.fill = device.fill - self.costs[node].fill if device.ends else 0.0
        self.ends[node] = now
        if (following := self.next_of[node]) >= 0:
            self._arrive(following, now)
        for other in self.after[node]:
            self._arrive(other, now + self.sync_s)

    def _arrive(self, node: int, now: float) -> None:
        """One of the things that `node` waits for has happened."""
        self.ready[node] = max(self.ready[node], now)
        self.left[node] -= 1
        if not self.left[node]:
            heapq.heappush(self.coming, (self.ready[node], node))


class Bounds(Value, frozen=True, kw_only=True):
    """Lower bounds of the makespan in seconds.

    Attributes:
        critical_path_s: The longest chain of nodes that wait for one another, each on its fastest device.
        work_s: What all nodes together occupy, divided by the number of devices (or threads).
        link_s: What the busiest link must carry; 0 on one device.
    """

    critical_path_s: float
    work_s: float
    link_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """The largest of the bounds."""
        return max(self.critical_path_s, self.work_s, self.link_s)


def find_bounds(
    dag: Dag, costs: Sequence[NodeCost], *, num_devices: int = 1, transfers: Iterable[Transfer] = ()
) -> Bounds:
    """The bounds of any schedule of `dag`.

    A node costs what it does alone on its fastest device; one that fills half of that counts for half of its
    time as work. `transfers` are copies of a given placement, and bound what that can reach.
    """
    links: dict[tuple[int, int], float] = {}
    for t in transfers:
        pair = (t.source, t.target)
        # Both directions of a link carry at once, so each is a bound of its own.
        links[pair] = links.get(pair, 0.0) + (t.end - t.start)
    return Bounds(
        critical_path_s=critical_path(dag, [cost.seconds for cost in costs]),
        work_s=sum(cost.seconds * cost.fill for cost in costs) / num_devices,
        link_s=max(links.values(), default=0.0),
    )
