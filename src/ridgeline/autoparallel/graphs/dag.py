"""Programs as graphs: nodes in issue order, edges from what must be done to what waits for it.

Sets of nodes are Python integers, bit v for node v: union, intersection and "is v in it" are single
operations on machine words, so a transitive closure of 5,000 nodes takes a fraction of a second.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from ridgeline.errors import ScheduleError

Edge = tuple[int, int]


class Dag(NamedTuple):
    """A directed acyclic graph whose nodes 0 .. `num_nodes` - 1 are numbered in issue order.

    Every edge (u, v) says that v waits for u, and has u < v. Made by hand where that is known to hold,
    by `Dag.of` where it is not.
    """

    num_nodes: int
    edges: tuple[Edge, ...]

    @classmethod
    def of(cls, num_nodes: int, edges: Iterable[Edge]) -> Self:
        """The graph with these edges, sorted, each once; a ScheduleError for one to no later node."""
        kept = tuple(sorted(set(edges)))
        for u, v in kept:
            if not 0 <= u < v < num_nodes:
                raise ScheduleError(
                    f"wanted edges (u, v) with 0 <= u < v < {num_nodes} nodes, got ({u}, {v}); number "
                    "the nodes in the order in which the program issues them"
                )
        return cls(num_nodes, kept)

    def children(self) -> list[list[int]]:
        """For each node the nodes that wait for it, in the order of the edges."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for u, v in self.edges:
            found[u].append(v)
        return found

    def parents(self) -> list[list[int]]:
        """For each node the nodes that it waits for, in the order of the edges."""
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for u, v in self.edges:
            found[v].append(u)
        return found


def members(mask: int) -> Iterator[int]:
    """The nodes of a bit mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def descendants(dag: Dag) -> list[int]:
    """For each node the bit mask of all nodes that wait for it, directly or not; itself not included.

    Cost: n^2 / 8 bytes for n nodes.
    """
    found = [0] * dag.num_nodes
    children = dag.children()
    # Edges lead to higher numbers, so that all children are complete when their parents are looked at.
    for u in reversed(range(dag.num_nodes)):
        mask = 0
        for v in children[u]:
            mask |= found[v] | (1 << v)
        found[u] = mask
    return found


def minimum_equivalent(dag: Dag) -> Dag:
    """The graph with the fewest edges that orders the same pairs of nodes.

    An edge goes when another child of its tail leads to its head.

    Source: the transitive reduction of Aho, Garey, Ullman 1972; unique for acyclic graphs.
    """
    reached = descendants(dag)
    kept: list[Edge] = []
    for u, children in enumerate(dag.children()):
        # Where another child leads to it, the order is kept without the edge.
        beyond = 0
        for v in children:
            beyond |= reached[v]
        kept.extend((u, v) for v in sorted(set(children)) if not beyond >> v & 1)
    return Dag(dag.num_nodes, tuple(kept))


def critical_path(dag: Dag, seconds: Sequence[float]) -> float:
    """Seconds of the longest chain of nodes that wait for one another: no schedule is shorter."""
    return max(upward_ranks(dag, seconds), default=0.0)


def upward_ranks(dag: Dag, seconds: Sequence[float]) -> list[float]:
    """For each node the seconds from its start to the end of the longest chain that begins with it.

    Source: the upward rank of Topcuoglu, Hariri, Wu 2002, without communication.
    """
    ranks = [0.0] * dag.num_nodes
    children = dag.children()
    for u in reversed(range(dag.num_nodes)):
        ranks[u] = seconds[u] + max((ranks[v] for v in children[u]), default=0.0)
    return ranks
