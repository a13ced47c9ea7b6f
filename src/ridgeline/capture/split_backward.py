"""One node that computes two independent things becomes two, so that they can run side by side.

A convolution's backward gives the gradient of its input, which the rest of the backward pass waits
for, and that of its weight, which nothing waits for before the end. The libraries compute them by
different kernels; torch calls both from one operator, where a schedule could not distinguish them.
"""

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

_BACKWARD = torch.ops.aten.convolution_backward.default
_MASK = 10
"""Position of `output_mask`: gradients of input, weight and bias."""


def split_backward(graph: fx.Graph, *, devices: Collection[str] = ("cuda",)) -> int:
    """Part the backward nodes of convolutions in two, in place; the results stay bit for bit the same.

    On CPUs the library shares work between both gradients, so they stay together by default.

    Args:
        graph: A traced graph with values without data in its nodes.
        devices: Kinds of devices whose nodes are split.

    Returns:
        The number of nodes that were split.
    """
    found = [
        node
        for node in graph.nodes
        if node.target is _BACKWARD
        and all(_mask(node)[:2])
        and _kind(node) in devices
        and all(user.target is operator.getitem for user in node.users)
    ]
    for node in found:
        _split(graph, node)
    return len(found)


def _split(graph: fx.Graph, node: fx.Node) -> None:
    has_bias = _mask(node)[2]
    values = node.meta["val"]
    with graph.inserting_before(node):
        parts = [
            _part(graph, node, mask) for mask in ([True, False, False], [False, True, has_bias])
        ]
    parts[0].meta["val"] = (values[0], None, None)
    parts[1].meta["val"] = (None, *values[1:])
    for item in list(node.users):
        item.args = (parts[0] if item.args[1] == 0 else parts[1], item.args[1])
    graph.erase_node(node)


def _part(graph: fx.Graph, node: fx.Node, mask: list[bool]) -> fx.Node:
    part = graph.call_function(_BACKWARD, (*node.args[:_MASK], mask), dict(node.kwargs))
    part.meta.update(node.meta)
    return part


def _mask(node: fx.Node) -> list[bool]:
    mask: Any = node.args[_MASK]
    return [bool(part) for part in mask]


def _kind(node: fx.Node) -> str:
    value = node.all_input_nodes[0].meta.get("val")
    return value.device.type if isinstance(value, Tensor) else ""
