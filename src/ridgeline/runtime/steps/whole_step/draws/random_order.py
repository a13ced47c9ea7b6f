"""Dropout that draws its mask in the order of memory, also when compiled, and before anything reads it.

The eager operator fills a mask in the order in which its elements lie in memory. A compiler lays the mask
of a transposed tensor out as it likes, and the same random numbers make another mask.

On a CPU the operator that fills a mask in place gives way to one that returns it. Torch's compiler (2.11 and
2.13) joins the kernel that makes room for a mask with the one that reads it, and fills it when both are over:
LayerNorm, GELU and dropout, twice, gave NaN.
"""

import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_FRESH = (_aten.empty_like.default, _aten.empty.memory_format, _aten.new_empty.default)
"""What makes room without values."""


def draw_in_memory_order(graph: fx.Graph) -> int:
    """Have masks drawn as contiguous ones, turned where they are not; how many were turned."""
    turned = 0
    for node in list(graph.nodes):
        if node.target is not _aten.bernoulli_.float:
            continue
        mask = node.args[0]
        value = mask.meta["val"]
        is_contiguous = value.is_contiguous()
        # Memory that something else sees as well has to be filled in place.
        is_fresh = mask.target in _FRESH and [*mask.users] == [node]
        if not is_fresh or (is_contiguous and value.device.type != "cpu"):
            continue
        order = list(range(value.dim()))
        if not is_contiguous:  # else strides of dimensions of one element say nothing
            order.sort(key=value.stride, reverse=True)
        with graph.inserting_before(node):
            drawn = _drawn(graph, node, [_size(graph, mask, dim) for dim in order])
            if not is_contiguous:
                back = [order.index(dim) for dim in range(value.dim())]
                drawn = graph.call_function(_aten.permute.default, (drawn, back))
        drawn.meta.update(node.meta)
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)
        if not mask.users:  # else its sizes are asked of it
            graph.erase_node(mask)
        turned += not is_contiguous
    return turned


def _size(graph: fx.Graph, mask: fx.Node, dim: int) -> int | fx.Node:
    """A size of a mask; one that depends on values is asked of the mask when the program runs."""
    size = mask.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    node = graph.call_function(_aten.sym_size.int, (mask, dim))
    node.meta["val"] = size
    return node


def _drawn(graph: fx.Graph, node: fx.Node, shape: list[int | fx.Node]) -> fx.Node:
    """A contiguous mask of that shape, by the numbers that `node` draws.

    Source: torch/aten/src/ATen/native/Dropout.cpp; `native_dropout` on a CPU fills its mask as `bernoulli_`
    does, whose numbers do not depend on the dtype that they are written in.
    """
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    settings: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    keep = node.args[1] if len(node.args) > 1 else 0.5
    if value.device.type != "cpu" or not isinstance(keep, float) or node.kwargs.get("generator"):
        empty = graph.call_function(_aten.empty.memory_format, (shape,), settings)
        return graph.call_function(_aten.bernoulli_.float, (empty, *node.args[1:]), node.kwargs)
    ones = graph.call_function(_aten.ones.default, (shape,), settings)
    both = graph.call_function(_aten.native_dropout.default, (ones, 1.0 - keep, True))
    kept = graph.call_function(operator.getitem, (both, 1))
    return graph.call_function(_aten._to_copy.default, (kept,), {"dtype": value.dtype})  # noqa: SLF001
