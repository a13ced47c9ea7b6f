"""Which ops must come before which: from data flow where it can be traced, else from storages.

Two sources, joined:

- *Data flow*: `make_fx` traces forward and backward once more; every operator is a node there, and its
  edges say which result of which operator it takes.
- *Storages*: in eager order, an op that reads a storage comes after the last one that wrote it, and an
  op that writes one comes after all that read it before. This also orders what happens in place,
  which the edges of the functional graph do not show.
"""

from collections.abc import Sequence

from torch import fx

from ridgeline.tracing.recorder import Record, Use

Edges = list[set[int]]
"""For each op the indices of the ops that it must wait for."""


def storage_edges(records: Sequence[Record]) -> tuple[Edges, Edges]:
    """Edges from the definition and use of storages in eager order.

    Returns:
        Reads and writes after writes (and after the op that made a view, for ops that take the view),
        and the hazard of writing in place: writes after reads.
    """
    flow: Edges = []
    hazards: Edges = []
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    view_maker: dict[tuple[object, ...], int] = {}
    for index, record in enumerate(records):
        before: set[int] = set()
        against: set[int] = set()
        for use in record.inputs:
            maker = view_maker.get(_look(use))
            if maker is not None:
                before.add(maker)
            if use.storage in writer:
                before.add(writer[use.storage])
        for storage in record.written:
            against.update(readers.pop(storage, ()))
            writer[storage] = (
                index  # what is written is among the inputs: it waits for the last writer
            )
        taken = {use.storage for use in record.inputs}
        if not record.is_view:
            for storage in taken.difference(record.written):
                readers.setdefault(storage, []).append(index)
        looks = {_look(use) for use in record.inputs}
        for use in record.outputs:
            if use.storage not in taken:
                writer[use.storage] = index
            elif _look(use) not in looks:
                view_maker[_look(use)] = index
        before.discard(index)
        against.discard(index)
        flow.append(before)
        hazards.append(against)
    return flow, hazards


def data_flow_edges(graph: fx.Graph, issued: Sequence[tuple[int, int]]) -> Edges:
    """Edges of a functional graph, carried over to the ops that added its nodes.

    Nodes that belong to no op (placeholders, autograd's own copies) pass on what they depend on.

    Args:
        graph: The traced graph, with all nodes in the order in which they were added.
        issued: For each op the positions (first, last + 1) of its nodes in the graph.
    """
    owner: dict[int, int] = {}
    for op, (first, end) in enumerate(issued):
        for position in range(first, end):
            owner[position] = op
    edges: Edges = [set() for _ in issued]
    sources: dict[fx.Node, frozenset[int]] = {}
    for position, node in enumerate(graph.nodes):
        incoming = frozenset().union(*(sources.get(n, frozenset()) for n in node.all_input_nodes))
        op = owner.get(position)
        if op is None:
            sources[node] = incoming
        else:
            sources[node] = frozenset((op,))
            edges[op] |= incoming - {op}
    return edges


def join(flow: Edges, hazards: Edges) -> tuple[tuple[int, ...], ...]:
    """All edges of each op, ascending."""
    return tuple(
        tuple(sorted(before | against)) for before, against in zip(flow, hazards, strict=True)
    )


def _look(use: Use) -> tuple[object, ...]:
    """What a tensor shows of its storage."""
    return use.storage, use.offset, use.shape, use.stride, use.dtype
