"""Computing a step's numbers once instead of once for every element.

An optimizer's bias corrections and step sizes are tensors of one element, computed with powers and roots.
A compiler that fuses them into the update of the parameters computes them again for every vector of
elements, which costs a small CPU step half of its time. Stacked into one vector they have to be written to
memory first, and the update reads them.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ridgeline.tensors.nests import tensors_in


def gather_scalars(graph: fx.Graph) -> int:
    """Put the computed scalars that an operator on larger tensors reads through one vector; how many did.

    Only scalars of 64 bits: those that the optimizer computes on the CPU. Values stay what they are.
    """
    gathered = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        written = _written(node)
        scalars = [
            leaf
            for leaf in node.all_input_nodes
            if _is_computed_scalar(leaf) and leaf not in written
        ]
        if not scalars or not _is_for_elements(node):
            continue
        # Right before its reader: a scalar that was updated in place has its last value there.
        with graph.inserting_before(node):
            vector = graph.call_function(torch.ops.aten.stack.default, (scalars,))
            picked = {
                scalar: graph.call_function(torch.ops.aten.select.int, (vector, 0, index))
                for index, scalar in enumerate(scalars)
            }
        for scalar, element in picked.items():
            node.replace_input_with(scalar, element)
        gathered += len(scalars)
    return gathered


def _written(node: fx.Node) -> set[fx.Node]:
    """What an operator writes in place: the update of a single weight may be as wide as a scalar."""
    schema = getattr(node.target, "_schema", None)
    found: list[Any] = []
    for index, argument in enumerate(schema.arguments if schema else ()):
        if argument.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found += pytree.tree_leaves(given)
    return {leaf for leaf in found if isinstance(leaf, fx.Node)}


def _is_computed_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, Tensor)
        and value.dim() == 0
        and value.dtype == torch.float64
    )


def _is_for_elements(node: fx.Node) -> bool:
    """Whether an operator works on (or in place of) tensors of more than one element."""
    tensors = tensors_in(_values(node))
    return any(tensor.dim() > 0 for tensor in tensors)


def _values(node: fx.Node) -> Any:
    """What a node returns; operators on lists that work in place return nothing, so what they read."""
    value = node.meta.get("val")
    if value is not None:
        return value
    return [leaf.meta.get("val") for leaf in node.all_input_nodes]
