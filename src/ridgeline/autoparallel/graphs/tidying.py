"""What a trace leaves in a graph and a program does not need."""

import torch
from torch import fx
from torch._ops import OpOverload

from ridgeline.autoparallel.graphs.aliasing import must_stay, writes

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""`torch.tensor([1.0, 2.0])` in a function: a copy of a constant, which is only needed to write into it."""


def tidy(graph: fx.Graph) -> None:
    """Drop what is not needed, and detach nodes: a program runs without gradients."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            (value,) = node.all_input_nodes
            is_returned = any(user.op == "output" for user in node.users)
            if value.op == "call_function" or not is_returned:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
        elif node.target in _LIFTS and all(_only_reads(user) for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=must_stay)


def _only_reads(node: fx.Node) -> bool:
    """Whether a node makes something new of its arguments: it neither writes nor hands them on."""
    if not isinstance(node.target, OpOverload) or writes(node):
        return False
    return all(result.alias_info is None for result in node.target._schema.returns)  # noqa: SLF001
