"""Lanes of maximum concurrency with the fewest syncs, against brute force and an oracle."""

import itertools
from collections.abc import Iterator, Sequence

import networkx as nx
from dag_strategies import all_dags, chain_partitions, closure, dags, distinct_orders, fewest_syncs
from hypothesis import given

from ridgeline.autoparallel.graphs.dag import Dag, Edge, descendants, minimum_equivalent
from ridgeline.autoparallel.scheduling.chains import assign_chains, share_lanes
from ridgeline.autoparallel.scheduling.schedule import (
    Schedule,
    check_schedule,
    in_program_order,
    needed_syncs,
)


def assert_is_concurrent(dag: Dag, assignment: Schedule) -> None:
    """No two nodes that do not wait for each other share a lane."""
    reached = descendants(dag)
    last: dict[int, int] = {}
    for node, lane in enumerate(assignment.lane_of):
        if lane in last:
            assert reached[last[lane]] >> node & 1
        last[lane] = node


def subsets(pairs: set[Edge]) -> Iterator[tuple[Edge, ...]]:
    for size in range(len(pairs) + 1):
        yield from itertools.combinations(sorted(pairs), size)


def lane_steps(lane_of: Sequence[int]) -> list[Edge]:
    """From each node to the next one of its lane."""
    last: dict[int, int] = {}
    steps = []
    for node, lane in enumerate(lane_of):
        if lane in last:
            steps.append((last[lane], node))
        last[lane] = node
    return steps


def oracle_matching(dag: Dag) -> int:
    """Size of a maximum matching of the minimum equivalent graph, by networkx."""
    graph = nx.Graph()
    tops = [("tail", node) for node in range(dag.num_nodes)]
    graph.add_nodes_from(tops)
    graph.add_edges_from((("tail", u), ("head", v)) for u, v in minimum_equivalent(dag).edges)
    return len(nx.bipartite.hopcroft_karp_matching(graph, tops)) // 2


def test_every_graph_up_to_six_nodes_is_assigned_optimally() -> None:
    """Brute force over all assignments of maximum concurrency finds none with fewer syncs."""
    for count in range(7):
        best = {dag.edges: fewest_syncs(dag) for dag in distinct_orders(count)}
        for dag in all_dags(count):
            assignment = assign_chains(dag)
            assert len(assignment.syncs) == best[minimum_equivalent(dag).edges]


def test_every_order_up_to_six_nodes_is_concurrent_shared_and_valid() -> None:
    """Chains and shared lanes keep every edge and concurrency, and sharing adds neither lane nor sync."""
    for count in range(7):
        for dag in distinct_orders(count):
            chains = assign_chains(dag)
            shared = share_lanes(dag, chains)
            for assignment in (chains, shared):
                assert_is_concurrent(dag, assignment)
                check_schedule(dag, assignment)
            assert shared.num_lanes <= chains.num_lanes
            assert shared.syncs == chains.syncs


def test_no_choice_of_syncs_does_with_fewer_up_to_four_nodes() -> None:
    """Trying every set of pairs as syncs, on every assignment, keeps all edges with no fewer."""
    for count in range(5):
        for dag in distinct_orders(count):
            wanted = closure(count, dag.edges)
            least = min(
                len(syncs)
                for lanes in chain_partitions(dag)
                for syncs in subsets(wanted)
                if wanted <= closure(count, [*lane_steps(lanes), *syncs])
            )
            assert len(assign_chains(dag).syncs) == least


def test_shared_lanes_are_as_few_as_can_be_up_to_five_nodes() -> None:
    """No assignment of maximum concurrency with as few syncs has fewer lanes."""
    for count in range(1, 6):
        for dag in distinct_orders(count):
            shared = share_lanes(dag, assign_chains(dag))
            fewest = min(
                max(lanes) + 1
                for lanes in chain_partitions(dag)
                if sum(lanes[u] != lanes[v] for u, v in dag.edges) == len(shared.syncs)
            )
            assert shared.num_lanes == fewest


@given(dags())
def test_syncs_are_the_edges_that_are_not_matched(dag: Dag) -> None:
    """Their number is |E| of the minimum equivalent graph less a maximum matching of it."""
    assignment = assign_chains(dag)
    assert_is_concurrent(dag, assignment)
    edges = minimum_equivalent(dag).edges
    assert len(assignment.syncs) == len(edges) - oracle_matching(dag)
    assert assignment.num_lanes == len(set(assignment.lane_of))


@given(dags())
def test_every_edge_follows_from_lanes_and_syncs(dag: Dag) -> None:
    """Original edges are implied, by chains and by shared lanes; and no sync is there for nothing."""
    chains = assign_chains(dag)
    shared = share_lanes(dag, chains)
    assert_is_concurrent(dag, shared)
    for assignment in (chains, shared):
        check_schedule(dag, assignment)
        order = range(dag.num_nodes)
        assert needed_syncs(dag, assignment.lane_of, order) == assignment.syncs


def test_two_chains_get_two_lanes_and_no_sync() -> None:
    """Independent chains need nothing between them."""
    dag = Dag.of(4, [(0, 2), (1, 3)])
    assert assign_chains(dag) == in_program_order((0, 1, 0, 1), ())


def test_a_lane_goes_on_where_another_has_ended() -> None:
    """Two diamonds in a row: four chains, two lanes."""
    dag = Dag.of(7, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6)])
    chains = assign_chains(dag)
    assert (chains.num_lanes, len(chains.syncs)) == (3, 4)
    shared = share_lanes(dag, chains)
    assert (shared.num_lanes, shared.syncs) == (2, chains.syncs)


def test_thousands_of_nodes_are_assigned() -> None:
    """Width, depth and number of nodes are not limited by recursion."""
    long = Dag.of(5_000, [(u, u + 1) for u in range(4_999)])
    assert assign_chains(long).num_lanes == 1
    wide = Dag.of(5_000, [])
    assert share_lanes(wide, assign_chains(wide)).num_lanes == 5_000
    ladder = Dag.of(5_000, [(u, v) for u in range(4_998) for v in (u + 1, u + 2)])
    check_schedule(ladder, assign_chains(ladder))
