"""Whether a schedule keeps every edge: by the order on its lanes and its syncs, and by nothing else."""

import itertools

from ridgeline.autoparallel.graphs.dag import Dag, Edge, descendants
from ridgeline.autoparallel.scheduling.schedule import Schedule
from ridgeline.errors import ScheduleError


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
