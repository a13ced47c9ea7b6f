"""`Schedule`: what runs on which lane, in which order, and who waits for whom; and its proof."""

import itertools
from collections.abc import Iterable, Sequence

from ridgeline.autoparallel.graphs.dag import Dag, Edge, descendants, minimum_equivalent
from ridgeline.codec import Value
from ridgeline.errors import ScheduleError


class Schedule(Value, frozen=True, kw_only=True):
    """The lanes of a program. A lane runs its nodes one after the other, in the order of issue.

    Attributes:
        lanes: Names of the lanes, `compute:0` and on; their number is the number of streams or threads.
        lane_of: For each node the index of its lane in `lanes`.
        order: All nodes in the order in which they are issued.
        syncs: (u, v) where v, on another lane, must wait until u is done. With the order on each lane
            they imply every edge of the graph that was scheduled, and none of them can be left out.
    """

    lanes: tuple[str, ...]
    lane_of: tuple[int, ...]
    order: tuple[int, ...]
    syncs: tuple[Edge, ...]

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return len(self.lanes)

    def nodes_by_lane(self) -> tuple[tuple[int, ...], ...]:
        """For each lane its nodes, in the order in which they run."""
        found: list[list[int]] = [[] for _ in self.lanes]
        for node in self.order:
            found[self.lane_of[node]].append(node)
        return tuple(map(tuple, found))

    def waits(self) -> dict[int, tuple[int, ...]]:
        """For each node that waits for other lanes, the nodes that it waits for."""
        found: dict[int, list[int]] = {}
        for u, v in self.syncs:
            found.setdefault(v, []).append(u)
        return {v: tuple(sources) for v, sources in found.items()}

    def signals(self) -> frozenset[int]:
        """The nodes that others on other lanes wait for: one event each is enough."""
        return frozenset(u for u, _ in self.syncs)

    def __repr__(self) -> str:
        return (
            f"Schedule({len(self.order)} nodes on {self.num_lanes} lanes, {len(self.syncs)} syncs, "
            f"{len(self.signals())} events)"
        )


def in_program_order(lane_of: Sequence[int], syncs: Iterable[Edge]) -> Schedule:
    """A schedule whose nodes are issued in the order of the program."""
    return Schedule(
        lanes=tuple(f"compute:{index}" for index in range(1 + max(lane_of, default=-1))),
        lane_of=tuple(lane_of),
        order=tuple(range(len(lane_of))),
        syncs=tuple(syncs),
    )


def serial_schedule(dag: Dag) -> Schedule:
    """Everything on one lane, in the order of the program."""
    return in_program_order((0,) * dag.num_nodes, ())


def needed_syncs(dag: Dag, lane_of: Sequence[int], order: Sequence[int]) -> tuple[Edge, ...]:
    """The fewest syncs that, with the order on each lane, imply every edge of `dag`.

    Raises:
        ScheduleError: the order issues a node before one that it waits for.

    Source: edges of the minimum equivalent graph of the dag and the orders of the lanes together whose
        ends are on different lanes; each is the only way from its tail to its head.
    """
    position = [0] * dag.num_nodes
    for place, node in enumerate(order):
        position[node] = place
    edges: list[Edge] = []
    for u, v in dag.edges:
        if position[u] >= position[v]:
            raise ScheduleError(
                f"wanted an order that issues node {u} before node {v}, which waits for it, got "
                f"positions {position[u]} and {position[v]}; sort the nodes topologically"
            )
        # By position and not by number: the reduction wants edges that lead to higher numbers.
        edges.append((position[u], position[v]))
    last: dict[int, int] = {}
    for place, node in enumerate(order):
        lane = lane_of[node]
        if lane in last:
            # What a lane orders by itself needs no sync, so its order takes part in the reduction.
            edges.append((last[lane], place))
        last[lane] = place
    reduced = minimum_equivalent(Dag(dag.num_nodes, tuple(edges)))
    found = ((order[a], order[b]) for a, b in reduced.edges)
    return tuple(sorted((u, v) for u, v in found if lane_of[u] != lane_of[v]))


def check_schedule(dag: Dag, schedule: Schedule) -> None:
    """Refuse a schedule in which a node could run before one that it waits for.

    Every edge must follow from steps along lanes and syncs, and every sync must wait for what was
    issued earlier: an event that is not recorded yet would not be waited for at all.

    Raises:
        ScheduleError: names the edge or sync and the lanes of its ends.

    Cost: n^2 / 8 bytes for n nodes.
    """
    position = _positions(dag, schedule)
    steps: list[Edge] = []
    for nodes in schedule.nodes_by_lane():
        places = [position[node] for node in nodes]
        steps.extend(itertools.pairwise(places))
    for u, v in schedule.syncs:
        if not (0 <= u < dag.num_nodes and 0 <= v < dag.num_nodes) or position[u] >= position[v]:
            raise ScheduleError(
                f"wanted syncs (u, v) that wait for a node issued earlier, got ({u}, {v}) among "
                f"{dag.num_nodes} nodes; put {u} before {v} in the order"
            )
        steps.append((position[u], position[v]))
    # Of the schedule alone, not of the edges to be proved: they may hold only by what runs.
    reached = descendants(Dag(dag.num_nodes, tuple(steps)))
    for u, v in dag.edges:
        if not reached[position[u]] >> position[v] & 1:
            raise ScheduleError(
                f"wanted node {v} to wait for node {u}, got a schedule in which nothing orders "
                f"{_where(schedule, u)} before {_where(schedule, v)}; add a sync ({u}, {v})"
            )


def _positions(dag: Dag, schedule: Schedule) -> list[int]:
    if sorted(schedule.order) != list(range(dag.num_nodes)):
        raise ScheduleError(
            f"wanted an order of all {dag.num_nodes} nodes, each once, got {len(schedule.order)} "
            "entries that are not; schedule the graph that is run"
        )
    lanes = range(schedule.num_lanes)
    if len(schedule.lane_of) != dag.num_nodes or any(k not in lanes for k in schedule.lane_of):
        raise ScheduleError(
            f"wanted one of {schedule.num_lanes} lanes for each of {dag.num_nodes} nodes, got "
            f"{len(schedule.lane_of)} lanes {sorted(set(schedule.lane_of))[:8]}; assign the graph that is run"
        )
    position = [0] * dag.num_nodes
    for place, node in enumerate(schedule.order):
        position[node] = place
    return position


def _where(schedule: Schedule, node: int) -> str:
    return f"{node} ({schedule.lanes[schedule.lane_of[node]]})"
