"""Batches: any nest of tuples, lists and dicts of tensors (and constants)."""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError
from ridgeline.tensors.constants import TensorHolder, constant
from ridgeline.tensors.copies import repeats, strided_copy
from ridgeline.tensors.moving import is_elsewhere, move_nest, moves_itself

Leaf = tuple[torch.Size, torch.dtype] | str | TensorHolder
"""Shape and dtype of a tensor, the text of a constant, or an object that holds tensors itself."""

Signature = tuple[pytree.TreeSpec, tuple[Leaf, ...]]
"""Structure of a batch, and its leaves."""


def leaves(batch: Any) -> list[Any]:
    """The leaves of the nest, in order."""
    return pytree.tree_leaves(batch)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with all tensors on `device`; a batch that is there already is returned as it is.

    Objects that hold tensors go with them, see `moved`; on the CPU, where a loop of plain torch moves nothing
    either, they are as they come.

    Cost: Copies are asynchronous where the source is pinned. An object that is no tensor is walked through
        in every call, 30 us and more, unless the device is the CPU.
    """
    kind = type(batch)
    if kind is tuple or kind is list or kind is dict:
        for leaf in batch.values() if kind is dict else batch:
            if type(leaf) is not Tensor or leaf.device != device:
                break
        else:
            return batch  # the usual cases, without the cost of walking a nest
    flat = pytree.tree_leaves(batch, is_leaf=moves_itself)
    if all(_is_there(device, leaf) for leaf in flat):
        return batch
    return move_nest(device, batch)


def _is_there(device: torch.device, leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.device == device
    return device.type == "cpu" or not is_elsewhere(device, leaf)


def apart(batch: Any) -> Any:
    """The batch with copies in the places where a tensor stands again."""
    flat, structure = pytree.tree_flatten(batch)
    seen = repeats(flat)
    if seen == [*range(len(flat))]:
        return batch
    copied = [
        strided_copy(leaf) if isinstance(leaf, Tensor) and first < place else leaf
        for place, (leaf, first) in enumerate(zip(flat, seen, strict=True))
    ]
    return pytree.tree_unflatten(copied, structure)


def rebuilt(batch: Any) -> Any:
    """The batch in containers of its own, so that code may put entries into it or take some away."""
    return pytree.tree_map(_itself, batch)


def _itself(leaf: Any) -> Any:
    return leaf


def num_samples(batch: Any) -> int:
    """The leading dimension that all tensors with dimensions share.

    Raises:
        BatchError: there is no such tensor, or they disagree.
    """
    sizes = [
        int(leaf.shape[0]) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()
    ]
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
    # Sizes differ by one at most, and each sample is in one part.
    bounds = [total * index // parts for index in range(parts + 1)]

    def piece(start: int, end: int, leaf: Any) -> Any:
        # A number beside the samples (a temperature) belongs to each part.
        return leaf[start:end] if isinstance(leaf, Tensor) and leaf.dim() else leaf

    return [
        (pytree.tree_map(partial(piece, start, end), batch), (end - start) / total)
        for start, end in pairwise(bounds)
    ]


def signature(batch: Any) -> Signature:
    """What must stay equal for a captured step to be replayed on the batch."""
    flat, structure = pytree.tree_flatten(batch)
    described = tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else constant(leaf) for leaf in flat
    )
    return structure, described
