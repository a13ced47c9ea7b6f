"""Batches: any nest of tuples, lists and dicts of tensors (and constants)."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError

Signature = tuple[str, tuple[tuple[tuple[int, ...], str] | str, ...]]
"""Structure of a batch, and per leaf the shape and dtype, or the text of a constant."""


def leaves(batch: Any) -> list[Any]:
    """The leaves of the nest, in order."""
    return pytree.tree_leaves(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all tensors on `device`; tensors already there are not copied.

    Cost: Copies are asynchronous where the source is pinned.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device != device:
            return leaf.to(device, non_blocking=True)
        return leaf

    return pytree.tree_map(move, batch)


def num_samples(batch: Any) -> int:
    """The leading dimension that all tensors with dimensions share.

    Raises:
        BatchError: there is no such tensor, or they disagree.
    """
    sizes = [int(leaf.shape[0]) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes or len(set(sizes)) > 1:
        raise BatchError(
            f"wanted a batch whose tensors share their leading dimension, got sizes {sizes or 'of none'}; "
            "put the samples along dimension 0 of every tensor"
        )
    return sizes[0]


def split(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """Micro-batches along dimension 0, each with its share of the samples.

    The shares make the weighted sum of mean losses the mean loss of the whole batch.

    Raises:
        BatchError: fewer samples than parts.
    """
    if parts == 1:
        return [(batch, 1.0)]
    total = num_samples(batch)
    if total < parts:
        raise BatchError(
            f"wanted at least accumulate={parts} samples in a batch, got {total}; lower accumulate"
        )
    bounds = [total * index // parts for index in range(parts + 1)]

    def piece(leaf: Any, start: int, end: int) -> Any:
        return leaf[start:end] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return [
        (pytree.tree_map(lambda x, s=start, e=end: piece(x, s, e), batch), (end - start) / total)
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]


def signature(batch: Any) -> Signature:
    """What must stay equal for a captured step to be replayed on the batch."""
    flat, spec = pytree.tree_flatten(batch)
    described = tuple(
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in flat
    )
    return str(spec), described


def check_compatible(wanted: Signature, got: Signature) -> bool:
    """Whether `got` may run in a step made for `wanted`: True if equal, False if only shorter.

    A batch with fewer samples (the last of an epoch) is fine in any execution; anything else is not.

    Raises:
        BatchError: another structure, dtype or shape; names the first leaf that differs.
    """
    if wanted == got:
        return True
    if wanted[0] != got[0]:
        raise BatchError(
            f"wanted batches of structure {wanted[0]}, got {got[0]}; this step was made for the former: "
            "make another TrainStep for other batches"
        )
    for index, (old, new) in enumerate(zip(wanted[1], got[1], strict=True)):
        if old == new:
            continue
        same_kind = isinstance(old, tuple) and isinstance(new, tuple) and old[1] == new[1]
        if same_kind and old[0][1:] == new[0][1:] and 0 < len(new[0]) and new[0][0] < old[0][0]:
            continue
        raise BatchError(
            f"wanted leaf {index} of the batch as {old}, got {new}; only the leading dimension may "
            "shrink (a last batch): pad the batch or use execution='eager'"
        )
    return False
