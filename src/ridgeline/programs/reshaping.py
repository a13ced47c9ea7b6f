"""Views in traced programs that the compiler may take of tensors laid out otherwise than in the trace.

It makes of a concatenation with nothing (a cache of keys that begins empty) a copy in the order of what is
concatenated, of which a view that the trace took may be none.
"""

import operator

import torch
from torch import fx
from torch._ops import OpOverload

from ridgeline.capture.operator_writes import written_nodes
from ridgeline.programs.inductor import copy_of

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)  # noqa: SLF001 - an operator


def reshaping(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a program of operators that copies where a view cannot be had, and computes the same.

    A view stays one where anything is written to the memory that it shows: in a copy that would be lost.
    """
    copied = copy_of(module)
    # All writes of the program, earlier or later: a view taken before a write has to show it as well.
    written = {_owner(value) for node in copied.graph.nodes for value in written_nodes(node)}
    for node in copied.graph.nodes:
        if node.target in _VIEWS and _owner(node) not in written:
            node.target = _aten.reshape.default
    copied.recompile()
    return copied


def _owner(node: fx.Node) -> fx.Node:
    """What made the memory that a node shows."""
    while _shows_another(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _shows_another(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        returns = node.target._schema.returns  # noqa: SLF001
        return bool(returns) and returns[0].alias_info is not None and bool(node.args)
    return node.target is operator.getitem
