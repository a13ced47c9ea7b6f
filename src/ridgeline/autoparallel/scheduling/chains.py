"""Lanes for one device: as much side by side as the graph allows, with the fewest syncs.

Two nodes that do not wait for each other, directly or not, never share a lane. A lane is then a chain of the
order, and an edge needs no sync where it leads from a node of a lane to the next one. How much of that is
worth while is not asked here: see `merging`.
"""

from ridgeline.autoparallel.graphs.dag import Dag, descendants, members, minimum_equivalent
from ridgeline.autoparallel.scheduling.matching import maximum_matching
from ridgeline.autoparallel.scheduling.schedule import Schedule, in_program_order


def assign_chains(dag: Dag) -> Schedule:
    """Lanes on which no two independent nodes meet, with the fewest syncs that such lanes can have.

    That is the number of edges of the minimum equivalent graph less the size of a maximum matching of
    it, in which each edge pairs its tail (left) with its head (right). Lanes may be many: where one
    ends before another begins, `share_lanes` joins them.

    Cost: O(n m / w + m sqrt(n)) for n nodes and m edges on words of w bits; 5,000 nodes in about 0.1 s.

    Source: Nimble (Kwon et al., NeurIPS 2020).
    """
    reduced = minimum_equivalent(dag)
    next_of = maximum_matching(_masks(reduced))
    syncs = (edge for edge in reduced.edges if next_of[edge[0]] != edge[1])
    return in_program_order(_lanes(next_of), syncs)


def share_lanes(dag: Dag, schedule: Schedule) -> Schedule:
    """The same schedule on fewer lanes: a lane that ends before another begins continues as that one.

    Independent nodes still never share a lane, and the syncs of `assign_chains` stay as they are: only an
    edge between the two lanes could save one, and it would have been matched.

    Source: Dilworth's theorem by matching (Fulkerson 1956), on the order "ends before the other begins".
        The fewest lanes for these chains; other chains with as few syncs may need fewer.
    """
    reached = descendants(dag)
    first = [-1] * schedule.num_lanes
    last = [-1] * schedule.num_lanes
    for node, lane in enumerate(schedule.lane_of):
        # On a lane nodes follow each other in issue order, so the first and the last seen are its ends.
        first[lane] = node if first[lane] < 0 else first[lane]
        last[lane] = node
    starts = sum(1 << node for node in first)
    lane_at = {node: lane for lane, node in enumerate(first)}
    follows = [sum(1 << lane_at[node] for node in members(reached[end] & starts)) for end in last]
    joined = _lanes(maximum_matching(follows))
    lane_of = [joined[lane] for lane in schedule.lane_of]
    syncs = ((u, v) for u, v in schedule.syncs if lane_of[u] != lane_of[v])
    return in_program_order(lane_of, syncs)


def _masks(dag: Dag) -> list[int]:
    masks = [0] * dag.num_nodes
    for u, v in dag.edges:
        masks[u] |= 1 << v
    return masks


def _lanes(next_of: list[int]) -> tuple[int, ...]:
    """Numbers the chains of "is followed by", whose partners are always later, by their first member."""
    lane_of = [-1] * len(next_of)
    count = 0
    for node, following in enumerate(next_of):
        if lane_of[node] < 0:
            lane_of[node] = count
            count += 1
        if following >= 0:
            lane_of[following] = lane_of[node]
    return tuple(lane_of)
