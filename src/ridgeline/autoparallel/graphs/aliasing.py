"""What an operator of a traced graph does to memory: reads, writes in place, makes, or only views it.

Tensors that share memory are one variable here, by the storage of the tensors without data that the trace
left in the graph; state is one variable by its real storage. Views count as accesses of the whole storage:
two halves of a buffer that are written by two operators are kept in order, which costs concurrency only.
"""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from ridgeline.capture.operator_writes import written_nodes
from ridgeline.tensors.nests import tensors_in

Memory = int
"""A storage, by a number of its own."""


class Accesses:
    """The memory behind every value of a graph.

    Args:
        graph: A graph traced with tensors without data.
        real: Placeholder or attribute to the real tensor that it stands for, where that is fixed.
    """

    def __init__(self, graph: fx.Graph, real: Mapping[fx.Node, Tensor]) -> None:
        self._storages: dict[Any, Memory] = {}
        # By address of the storage object, as tensors without data have no `data_ptr` that distinguishes
        # them.
        self._kept: list[Any] = []  # storages whose address must not be given to another one
        self._of: dict[fx.Node, frozenset[Memory]] = {}
        for node in graph.nodes:
            memories = {self._number(value) for value in tensors_in(node.meta.get("val"))}
            if node in real:
                memory = self._number(real[node])
                # Views of it in the graph share the storage without data, and have to lead to the real one,
                # too.
                for value in tensors_in(node.meta.get("val")):
                    self._storages[value.untyped_storage()._cdata] = memory  # noqa: SLF001
                memories = {memory}
            self._of[node] = frozenset(memories)

    def of(self, node: fx.Node) -> frozenset[Memory]:
        """The memory of a value: one storage for a tensor, several for a list of tensors."""
        return self._of[node]

    def written(self, node: fx.Node) -> frozenset[Memory]:
        """The memory of arguments that an operator writes in place."""
        return frozenset().union(*(self._of[argument] for argument in written_nodes(node)))

    def read(self, node: fx.Node) -> frozenset[Memory]:
        """The memory of all arguments; what is written in place counts as read, too."""
        return frozenset().union(*(self._of[argument] for argument in node.all_input_nodes))

    def is_view(self, node: fx.Node) -> bool:
        """Whether it computes nothing: it takes an item, or looks at an argument's memory in another way."""
        if node.op != "call_function":
            return False
        # Not by its memory: the items of an operator with several results have storages of their own.
        if node.target is operator.getitem:
            return True
        if writes(node) or not self._of[node]:
            return False
        return self._of[node] <= self.read(node)

    def _number(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        return self._storages.setdefault(storage._cdata, len(self._storages))  # noqa: SLF001


def writes(node: fx.Node) -> bool:
    """Whether an operator writes into one of its arguments."""
    return bool(written_nodes(node))


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws random numbers, so that its place among the others that do matters."""
    return (
        isinstance(node.target, OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
    )


def must_stay(node: fx.Node) -> bool:
    """Whether a node does something although its value is not used."""
    return node.is_impure() or writes(node) or is_random(node)


def num_bytes(node: fx.Node) -> int:
    """Size of a value: of its elements, not of the storage behind a view."""
    return sum(value.numel() * value.element_size() for value in tensors_in(node.meta.get("val")))
