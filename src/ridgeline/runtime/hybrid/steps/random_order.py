"""Dropout that draws its mask in the order of memory, also when compiled.

The eager operator fills a mask in the order in which its elements lie in memory. A compiler lays the mask
of a transposed tensor out as it likes, and the same random numbers make another mask.
"""

import torch
from torch import fx

_aten = torch.ops.aten


def draw_in_memory_order(graph: fx.Graph) -> int:
    """Have masks of tensors that are not contiguous drawn as contiguous ones and turned; how many were.

    Args:
        graph: As traced, with its nodes' `val`; changed.
    """
    turned = 0
    for node in list(graph.nodes):
        if node.target is not _aten.bernoulli_.float:
            continue
        mask = node.args[0]
        value = mask.meta["val"]
        is_fresh = mask.target is _aten.empty_like.default and [*mask.users] == [node]
        if not is_fresh or value.is_contiguous():
            continue
        order = sorted(range(value.dim()), key=value.stride, reverse=True)
        shape = [value.shape[dim] for dim in order]
        with graph.inserting_before(node):
            settings = {"dtype": value.dtype, "device": value.device}
            empty = graph.call_function(_aten.empty.memory_format, (shape,), settings)
            drawn = graph.call_function(node.target, (empty, *node.args[1:]), node.kwargs)
            back = [order.index(dim) for dim in range(value.dim())]
            view = graph.call_function(_aten.permute.default, (drawn, back))
        view.meta.update(node.meta)
        node.replace_all_uses_with(view)
        graph.erase_node(node)
        graph.erase_node(mask)
        turned += 1
    return turned
