"""From the nodes of a traced graph to operations, and from what they touch to the edges between them.

An operation is one operator that computes. Views and items cost nothing on a device, so they are no nodes of
the schedule: those of a result run with the operation that computed it, those of an input or of state with
every operation that reads them.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx

from ridgeline.autoparallel.graphs.aliasing import (
    Accesses,
    Memory,
    is_random,
    num_bytes,
)
from ridgeline.autoparallel.graphs.dag import Dag, Edge
from ridgeline.tensors.nests import tensors_in


class Operation(NamedTuple):
    """One operator that computes, with the views before and after it.

    Attributes:
        node: The node of the graph that computes.
        members: What runs for it, in order: views of inputs that it reads, `node`, views of its results.
        reads: Slots that it reads: of inputs, of state, and of what other operations made.
        makes: Slots that it fills.
        device: Where its results are.
    """

    node: fx.Node
    members: tuple[fx.Node, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    device: torch.device


class Grouping(NamedTuple):
    """The operations of a graph; `late_views` are views of inputs that it returns."""

    operations: tuple[Operation, ...]
    late_views: tuple[fx.Node, ...]


class Dependencies(NamedTuple):
    """The edges between operations, see `Program`, and who touches which memory."""

    dag: Dag
    edge_values: dict[Edge, tuple[int, ...]]
    edge_bytes: dict[Edge, int]
    in_place: frozenset[int]
    written_memory: frozenset[Memory]
    memory_users: dict[Memory, tuple[int, ...]]


def group(graph: fx.Graph, accesses: Accesses, slot_of: dict[fx.Node, int]) -> Grouping:
    """The operations of a graph, in the order of its nodes."""
    owner: dict[fx.Node, int] = {}
    parts: list[list[fx.Node]] = []
    floating: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        owners = {owner.get(value, -1) for value in node.all_input_nodes}
        # Views of inputs have no operation to belong to yet; each reader makes them itself, on its own lane.
        if accesses.is_view(node) and owners == {-1}:
            floating.add(node)
        elif accesses.is_view(node) and len(owners) == 1:
            (owner[node],) = owners
            parts[owner[node]].append(node)
        else:
            owner[node] = len(parts)
            # A view of what two operations made (a list of both) needs both, so it is an operation of its
            # own.
            parts.append([*_before(node, floating), node])
    late = _before(graph.output_node(), floating)
    return Grouping(tuple(_operation(part, owner, slot_of) for part in parts), tuple(late))


def _before(node: fx.Node, floating: set[fx.Node]) -> list[fx.Node]:
    """The views of inputs that a node needs, each after what it looks at."""
    found: dict[fx.Node, None] = {}

    def visit(value: fx.Node) -> None:
        if value in floating and value not in found:
            for argument in value.all_input_nodes:
                visit(argument)
            found[value] = None

    for value in node.all_input_nodes:
        visit(value)
    return list(found)


def _operation(
    members: list[fx.Node], owner: dict[fx.Node, int], slot_of: dict[fx.Node, int]
) -> Operation:
    own = [member for member in members if member in owner]
    inside = set(members)
    reads = dict.fromkeys(
        slot_of[value]
        for member in members
        for value in member.all_input_nodes
        if value not in inside
    )
    return Operation(
        node=own[0],
        members=tuple(members),
        reads=tuple(reads),
        makes=tuple(slot_of[member] for member in own),
        device=_device(own[0]),
    )


def _device(node: fx.Node) -> torch.device:
    found = tensors_in([value.meta.get("val") for value in (node, *node.all_input_nodes)])
    return found[0].device if found else torch.device("cpu")


def depend(
    operations: Sequence[Operation], accesses: Accesses, slot_of: dict[fx.Node, int]
) -> Dependencies:
    """The edges: from makers to readers, around writes in place, and along the random operators."""
    maker: dict[int, int] = {}
    node_at = {slot: node for node, slot in slot_of.items()}
    writer: dict[Memory, int] = {}
    readers: dict[Memory, list[int]] = defaultdict(list)
    users: dict[Memory, dict[int, None]] = defaultdict(dict)
    last_random: dict[torch.device, int] = {}
    values: dict[Edge, list[int]] = defaultdict(list)
    edges: set[Edge] = set()
    written_memory: set[Memory] = set()
    for index, operation in enumerate(operations):
        for slot in operation.reads:
            if slot in maker:
                values[maker[slot], index].append(slot)
                edges.add((maker[slot], index))
        maker.update(dict.fromkeys(operation.makes, index))
        read, written = accesses.read(operation.node), accesses.written(operation.node)
        written_memory |= written
        for memory in (*read, *accesses.of(operation.node)):
            users[memory][index] = None
            # Whoever reads or writes comes after the last write; whoever writes also after all reads since
            # then.
            if memory in writer:
                edges.add((writer[memory], index))
            if memory in written:
                edges.update((reader, index) for reader in readers.pop(memory, ()))
                writer[memory] = index
            else:
                readers[memory].append(index)
        if is_random(operation.node):
            # One generator a device: numbers are those of the function only where they are drawn in its
            # order.
            if operation.device in last_random:
                edges.add((last_random[operation.device], index))
            last_random[operation.device] = index
    edges = {(u, v) for u, v in edges if u != v}
    return Dependencies(
        dag=Dag.of(len(operations), edges),
        edge_values={edge: tuple(slots) for edge, slots in values.items()},
        edge_bytes={edge: _bytes([node_at[s] for s in values[edge]], accesses) for edge in edges},
        in_place=frozenset(index for memory in written_memory for index in users[memory]),
        written_memory=frozenset(written_memory),
        memory_users={memory: tuple(found) for memory, found in users.items()},
    )


def _bytes(nodes: Sequence[fx.Node], accesses: Accesses) -> int:
    """Bytes of values, those of several views of one storage once."""
    largest: dict[frozenset[Memory], int] = {}
    for node in nodes:
        memory = accesses.of(node)
        largest[memory] = max(largest.get(memory, 0), num_bytes(node))
    return sum(largest.values())
