"""Graphs, their closures and minimum equivalents, and maximum matchings."""

import networkx as nx
import pytest
from dag_strategies import all_dags, closure, dags
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.autoparallel.graphs.dag import (
    Dag,
    critical_path,
    descendants,
    members,
    minimum_equivalent,
    upward_ranks,
)
from ridgeline.autoparallel.scheduling.matching import maximum_matching
from ridgeline.errors import ScheduleError


def test_edges_are_sorted_and_kept_once() -> None:
    """`Dag.of` does not care in which order edges are given, nor how often."""
    assert Dag.of(3, [(1, 2), (0, 1), (1, 2)]) == Dag(3, ((0, 1), (1, 2)))


@pytest.mark.parametrize("edge", [(1, 1), (2, 1), (0, 3), (-1, 2)])
def test_an_edge_leads_to_a_later_node(edge: tuple[int, int]) -> None:
    """An edge backwards, to itself or to no node is refused with its numbers."""
    with pytest.raises(ScheduleError) as error:
        Dag.of(3, [edge])
    assert str(error.value) == (
        f"wanted edges (u, v) with 0 <= u < v < 3 nodes, got ({edge[0]}, {edge[1]}); number the nodes in "
        "the order in which the program issues them"
    )


@given(dags())
def test_descendants_are_the_transitive_closure(dag: Dag) -> None:
    """The bit masks hold exactly the pairs of the closure."""
    found = {(u, v) for u, mask in enumerate(descendants(dag)) for v in members(mask)}
    assert found == closure(dag.num_nodes, dag.edges)


@given(dags())
def test_the_minimum_equivalent_is_networkx_transitive_reduction(dag: Dag) -> None:
    """The edges that remain are those of an independent implementation."""
    graph = nx.DiGraph(dag.edges)
    graph.add_nodes_from(range(dag.num_nodes))
    assert set(minimum_equivalent(dag).edges) == set(nx.transitive_reduction(graph).edges)


def test_no_edge_of_a_minimum_equivalent_can_be_left_out() -> None:
    """On all graphs of four nodes: it orders the same pairs, and with any edge less it would not."""
    for dag in all_dags(4):
        reduced = minimum_equivalent(dag)
        wanted = closure(4, dag.edges)
        assert closure(4, reduced.edges) == wanted
        for edge in reduced.edges:
            assert closure(4, [e for e in reduced.edges if e != edge]) != wanted


def test_the_critical_path_is_the_longest_chain() -> None:
    """A diamond is as long as its longer side; no nodes take no time."""
    diamond = Dag.of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert critical_path(diamond, [1.0, 5.0, 2.0, 1.0]) == 7.0
    assert upward_ranks(diamond, [1.0, 5.0, 2.0, 1.0]) == [7.0, 6.0, 3.0, 1.0]
    assert critical_path(Dag(0, ()), []) == 0.0


@given(st.lists(st.integers(0, 2**12 - 1), max_size=12))
def test_a_matching_is_valid_and_as_large_as_networkx_finds(neighbours: list[int]) -> None:
    """Partners are neighbours, nobody has two, and an independent implementation pairs no more."""
    partners = maximum_matching(neighbours)
    taken = [right for right in partners if right >= 0]
    assert len(set(taken)) == len(taken)
    for left, right in enumerate(partners):
        assert right < 0 or neighbours[left] >> right & 1
    graph = nx.Graph()
    graph.add_nodes_from(("left", left) for left in range(len(neighbours)))
    for left, mask in enumerate(neighbours):
        graph.add_edges_from((("left", left), ("right", right)) for right in members(mask))
    tops = [("left", left) for left in range(len(neighbours))]
    best = nx.bipartite.hopcroft_karp_matching(graph, tops)
    assert len(taken) == len(best) // 2


def test_a_long_augmenting_path_needs_no_recursion() -> None:
    """Five thousand pairs that must all be shifted by one are found."""
    count = 5_000
    neighbours = [0b11 << left for left in range(count)]
    neighbours.append(1)  # takes the first partner of all, so that every other one moves up
    assert sorted(maximum_matching(neighbours)) == list(range(count + 1))
