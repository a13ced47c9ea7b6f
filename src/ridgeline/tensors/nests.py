"""Nests of tensors: a `torch.Size`, which torch's trees give back as a plain tuple, stays one."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def builder(tree: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """A function from the leaves of a nest to the nest; `pytree.tree_unflatten`, but for sizes."""
    if not _has_sizes(tree):
        return lambda leaves: pytree.tree_unflatten(leaves, tree)
    return lambda leaves: _built(tree, iter(leaves))


def tensors_in(nest: Any) -> list[torch.Tensor]:
    """The tensors in a nest of tuples, lists and dictionaries, in order."""
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], Any], nest: Any) -> Any:
    """The nest, of tensors and constants, with each tensor changed, and all else as it is."""
    leaves, tree = pytree.tree_flatten(nest)
    new = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return builder(tree)(new)


def _has_sizes(tree: Any) -> bool:
    return tree.type is torch.Size or any(map(_has_sizes, children(tree)))


def _built(tree: Any, leaves: Iterator[Any]) -> Any:
    if tree.is_leaf():
        return next(leaves)
    parts = [_built(child, leaves) for child in children(tree)]
    if tree.type is torch.Size:
        return torch.Size(parts)
    return pytree.SUPPORTED_NODES[tree.type].unflatten_fn(parts, tree.context)


def children(tree: Any) -> Sequence[Any]:
    """The structures of what a nest holds."""
    # An attribute in older releases of torch, a method in newer ones.
    return tree.children() if hasattr(tree, "children") else tree.children_specs
