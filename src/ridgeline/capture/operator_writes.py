"""Which arguments operators write into: by their schemas, and where these do not say so."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

aten = torch.ops.aten

HIDDEN_WRITES: dict[OpOverloadPacket, tuple[str, ...]] = dict.fromkeys(
    (aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm),
    ("running_mean", "running_var"),
)
"""Arguments that are written in training although the schema does not say so. Source: the kernels
update the running statistics in place; pytorch/aten/src/ATen/native/native_functions.yaml lists
these arguments without an alias annotation."""


def written_names(func: OpOverload, value_of: Callable[[str], Any]) -> tuple[str, ...]:
    """Names of the arguments that a call writes into; `value_of` gives the value of one by its name."""
    hidden = HIDDEN_WRITES.get(func.overloadpacket, ())
    # In evaluation the statistics are only read.
    return _declared(func) + hidden if hidden and value_of("training") else _declared(func)


@cache
def _declared(func: OpOverload) -> tuple[str, ...]:
    arguments = func._schema.arguments  # noqa: SLF001 - torch has no public name for it
    return tuple(one.name for one in arguments if one.alias_info and one.alias_info.is_write)


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes of a graph of operators that one of them writes into."""
    if not isinstance(node.target, OpOverload):
        return []
    arguments = node.target._schema.arguments  # noqa: SLF001
    given = {one.name: value for one, value in zip(arguments, node.args, strict=False)}
    given |= node.kwargs
    written = [given.get(name) for name in written_names(node.target, given.get)]
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, fx.Node)]
