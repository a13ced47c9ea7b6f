"""Attention masks that a program computes from constants only, passed to the kernel as arguments.

While torch's compiler reads them, libraries hand attention a causal mask that they leave out of eager steps
(transformers 5, `masking_utils`). Kernels that know that attention is causal compute half of it and read no
mask; those for any mask compute all. An eager step has the same results.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.utils import _pytree as pytree

_ATTENTION = functional.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Its arguments that may be given by position."""
_LARGEST = 1 << 26
"""Elements of a mask that is looked at; one is computed on the CPU, in about 0.1 s."""
_MAKING = (
    *("arange", "ones", "zeros", "full", "eye", "new_ones", "new_zeros", "new_full"),
    *("ones_like", "zeros_like", "full_like", "clone", "cat", "stack"),
)
_COMPUTING = (
    *("eq", "ne", "le", "lt", "ge", "gt", "add", "sub", "mul", "neg", "cumsum", "diff"),
    *("and_", "or_", "xor", "invert", "logical_and", "logical_or", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_not", "where", "masked_fill", "tril", "triu"),
    *("to", "bool", "int", "long", "float", "type_as"),
)
_SHAPING = (
    *("getitem", "expand", "expand_as", "view", "reshape", "unsqueeze", "squeeze", "flatten"),
    *("transpose", "permute", "repeat", "contiguous", "size"),
)
_PURE = frozenset({*_MAKING, *_COMPUTING, *_SHAPING})
"""Functions and methods that always give the same, and change nothing."""
_MODULES = (None, "_operator", "torch", "torch.functional", "torch.nn.functional")
"""Of such functions."""


def use_causal_attention(graph: fx.GraphModule) -> None:
    """Change a graph that TorchDynamo made so that causal attention says so, and needless masks are gone.

    Cost: Computes each mask that is constant once, on the CPU.
    """
    kinds: dict[fx.Node, str | None] = {}
    for node in graph.graph.find_nodes(op="call_function", target=_ATTENTION):
        given = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        mask = given.get("attn_mask")
        # torch refuses a mask beside `is_causal`; such a call is left to raise that itself.
        if not isinstance(mask, fx.Node) or given.get("is_causal"):
            continue
        if mask not in kinds:  # that all layers may share
            kinds[mask] = _kind(_constant(mask))
        if kinds[mask] is not None:
            given |= {"attn_mask": None, "is_causal": kinds[mask] == "causal"}
            # By name, since arguments may have been given by position up to the mask.
            node.args, node.kwargs = (), given
    if any(kinds.values()):
        graph.recompile()


def _kind(mask: Tensor | None) -> str | None:
    """`all` where every query sees every key, `causal`, or None for what is neither."""
    if mask is None or mask.ndim < 2:
        return None
    sees = mask if mask.dtype == torch.bool else _sees(mask)
    if sees is None:
        return None
    if sees.all():
        return "all"
    queries, keys = sees.shape[-2:]
    # Only square ones: for others torch aligns a causal mask with the first key, libraries often with the
    # last.
    if queries == keys and torch.equal(sees, torch.ones_like(sees).tril()):
        return "causal"
    return None


def _sees(added: Tensor) -> Tensor | None:
    """What a mask that is added lets through: it is zero there, and the lowest number or less elsewhere."""
    sees = added == 0
    if not added.is_floating_point() or not (sees | (added <= torch.finfo(added.dtype).min)).all():
        return None
    return sees


def _constant(node: fx.Node) -> Tensor | None:
    """The value of a node, if it depends on nothing that the program is given; computed on the CPU."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor) or not all(type(size) is int for size in example.shape):
        return None
    if example.numel() > _LARGEST or example.requires_grad:
        return None
    needed = _needed(node)
    if needed is None:
        return None
    values: dict[fx.Node, Any] = {}
    # Where a script has set a default device, tensors made without one would be there.
    with torch.no_grad(), torch.device("cpu"):
        for part in needed:
            given = fx.node.map_arg((part.args, part.kwargs), values.__getitem__)
            try:
                values[part] = _run(
                    part, *pytree.tree_map_only((torch.device, str), _on_cpu, given)
                )
            except RuntimeError:  # the CPU has no such kernel: the mask stays
                return None
    value = values[node]
    return value if isinstance(value, Tensor) and value.shape == example.shape else None


def _needed(node: fx.Node) -> list[fx.Node] | None:
    """The nodes that a node is computed from, in order; None if one is not `_PURE`, or changed in place."""
    found: set[fx.Node] = set()
    left = [node]
    while left:
        part = left.pop()
        if part in found:
            continue
        if not _is_pure(part):
            return None
        found.add(part)
        left += part.all_input_nodes
    # Views and what they show share memory: a write into either changes the mask after it was made.
    if any(_writes(user) for part in found for user in part.users):
        return None
    return [part for part in node.graph.nodes if part in found]


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _is_pure(node: fx.Node) -> bool:
    if node.op == "call_function":
        is_torchs = getattr(node.target, "__module__", None) in _MODULES
    else:
        is_torchs = node.op == "call_method"
    return is_torchs and _name(node) in _PURE and "out" not in node.kwargs


def _writes(node: fx.Node) -> bool:
    name = _name(node)
    is_in_place = name.endswith("_") and name not in ("and_", "or_")
    return (
        is_in_place
        or name in ("setitem", "iadd", "isub", "imul", "iand", "ior")
        or "out" in node.kwargs
    )


def _run(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _on_cpu(value: torch.device | str) -> torch.device | str:
    """A device or the name of one; other text stays."""
    is_name = isinstance(value, str)
    return (
        "cpu" if is_name and value.startswith("cuda") else value if is_name else torch.device("cpu")
    )
