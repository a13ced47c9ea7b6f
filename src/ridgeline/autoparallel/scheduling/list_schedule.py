"""Lanes for a fixed number of workers: threads on a CPU."""

import heapq
from collections.abc import Sequence

from ridgeline.autoparallel.graphs.dag import Dag, upward_ranks
from ridgeline.autoparallel.scheduling.schedule import Schedule, needed_syncs


def list_schedule(
    dag: Dag, seconds: Sequence[float], num_lanes: int, *, sync_s: float = 0.0
) -> Schedule:
    """A schedule on at most `num_lanes` lanes: whenever one is idle, it takes the most urgent ready node.

    Urgent is what has the longest chain of work behind it. Without `sync_s` no schedule on P lanes is
    better by more than a factor of 2 - 1/P. A node goes to the idle lane on which it can start first;
    among equals to that of the one that it waited for last, so that no thread has to wake another.

    A node takes its `seconds`; `sync_s` as of `run_schedule`.

    Source: Graham 1966 (the bound); upward ranks as priorities: Topcuoglu, Hariri, Wu 2002.
    """
    ranks = upward_ranks(dag, seconds)
    parents, children = dag.parents(), dag.children()
    left = [len(before) for before in parents]
    # By number among equals, so that all workers and all runs make the same schedule.
    ready = [(-ranks[node], node) for node in range(dag.num_nodes) if not left[node]]
    heapq.heapify(ready)
    idle = set(range(num_lanes))
    lane_of = [0] * dag.num_nodes
    ends = [0.0] * dag.num_nodes
    running: list[tuple[float, int]] = []
    order: list[int] = []
    now = 0.0
    while ready or running:
        while ready and idle:
            _, node = heapq.heappop(ready)
            lane, start = _first_lane(node, now, idle, parents, lane_of, ends, sync_s)
            idle.remove(lane)
            lane_of[node] = lane
            ends[node] = start + seconds[node]
            order.append(node)
            heapq.heappush(running, (ends[node], node))
        now = running[0][0]
        # Whatever ends at one time is known before anything is chosen.
        while running and running[0][0] == now:
            _, done = heapq.heappop(running)
            idle.add(lane_of[done])
            for child in children[done]:
                left[child] -= 1
                if not left[child]:
                    heapq.heappush(ready, (-ranks[child], child))
    used = 1 + max(lane_of, default=-1)
    return Schedule(
        lanes=tuple(f"compute:{index}" for index in range(used)),
        lane_of=tuple(lane_of),
        order=tuple(order),
        syncs=needed_syncs(dag, lane_of, order),
    )


def _first_lane(
    node: int,
    now: float,
    idle: set[int],
    parents: Sequence[Sequence[int]],
    lane_of: Sequence[int],
    ends: Sequence[float],
    sync_s: float,
) -> tuple[int, float]:
    """The idle lane on which `node` starts first, and when that is."""
    before = sorted(parents[node], key=lambda parent: -ends[parent])
    latest = lane_of[before[0]] if before else -1

    def start(lane: int) -> float:
        waits = (ends[p] + (sync_s if lane_of[p] != lane else 0.0) for p in before)
        return max(now, max(waits, default=0.0))

    # Lanes that ran nothing that this node waits for are alike: the first stands for all of them.
    near = {lane_of[p] for p in before} & idle
    others = sorted(idle - near)[:1]
    lane = min((*sorted(near), *others), key=lambda lane: (start(lane), lane != latest, lane))
    return lane, start(lane)
