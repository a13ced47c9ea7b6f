"""Graphs for the tests of schedules: random ones, all small ones, and brute-force optima."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ridgeline.autoparallel.graphs.dag import Dag, Edge, descendants, minimum_equivalent


@st.composite
def dags(draw: DrawFn, most_nodes: int = 30) -> Dag:
    """Any graph of up to `most_nodes` nodes, from empty to complete."""
    count = draw(st.integers(0, most_nodes))
    pairs = list(itertools.combinations(range(count), 2))
    edges = draw(st.lists(st.sampled_from(pairs), max_size=3 * count)) if pairs else []
    return Dag.of(count, edges)


def all_dags(num_nodes: int) -> Iterator[Dag]:
    """Every graph of so many nodes whose edges lead from lower to higher numbers."""
    pairs = list(itertools.combinations(range(num_nodes), 2))
    for chosen in itertools.product((False, True), repeat=len(pairs)):
        yield Dag(
            num_nodes, tuple(pair for pair, is_in in zip(pairs, chosen, strict=True) if is_in)
        )


def distinct_orders(num_nodes: int) -> Iterator[Dag]:
    """One graph, its minimum equivalent, for each partial order that `all_dags` give."""
    seen: set[tuple[Edge, ...]] = set()
    for dag in all_dags(num_nodes):
        reduced = minimum_equivalent(dag)
        if reduced.edges not in seen:
            seen.add(reduced.edges)
            yield reduced


def closure(num_nodes: int, edges: Sequence[Edge]) -> set[Edge]:
    """All pairs of nodes that the edges order, by Warshall's algorithm: slow and obviously right."""
    pairs = set(edges)
    for middle in range(num_nodes):
        before = [u for u, v in pairs if v == middle]
        after = [v for u, v in pairs if u == middle]
        pairs.update(itertools.product(before, after))
    return pairs


def chain_partitions(dag: Dag) -> Iterator[tuple[int, ...]]:
    """Every way to put nodes on lanes such that no two independent nodes share one."""
    reached = descendants(dag)
    lane_of: list[int] = []

    def extend(ends: list[int]) -> Iterator[tuple[int, ...]]:
        node = len(lane_of)
        if node == dag.num_nodes:
            yield tuple(lane_of)
            return
        for lane in range(len(ends) + 1):
            if lane < len(ends) and not reached[ends[lane]] >> node & 1:
                continue
            lane_of.append(lane)
            longer = [*ends, node] if lane == len(ends) else [*ends]
            longer[lane] = node
            yield from extend(longer)
            lane_of.pop()

    yield from extend([])


def fewest_syncs(dag: Dag) -> int:
    """Least number of syncs over all assignments of maximum concurrency."""
    edges = minimum_equivalent(dag).edges
    return min(sum(lanes[u] != lanes[v] for u, v in edges) for lanes in chain_partitions(dag))


def shortest_makespan(dag: Dag, seconds: Sequence[float], num_lanes: int) -> float:
    """Length of the best schedule on so many equal workers, by trying all."""
    parents = dag.parents()
    best = sum(seconds)

    @cache
    def search(done: frozenset[tuple[int, float]], free: tuple[float, ...]) -> None:
        nonlocal best
        ends = dict(done)
        if max(ends.values(), default=0.0) >= best:
            return
        if len(ends) == dag.num_nodes:
            best = max(ends.values(), default=0.0)
            return
        for node in range(dag.num_nodes):
            if node in ends or any(parent not in ends for parent in parents[node]):
                continue
            ready = max((ends[parent] for parent in parents[node]), default=0.0)
            for at in set(free):
                end = max(ready, at) + seconds[node]
                left = list(free)
                left.remove(at)
                search(done | {(node, end)}, tuple(sorted((*left, end))))

    search(frozenset(), (0.0,) * num_lanes)
    return best
