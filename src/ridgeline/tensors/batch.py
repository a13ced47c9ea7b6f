"""Batches: any nest of tuples, lists and dicts of tensors (and constants)."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError
from ridgeline.tensors.constants import TensorHolder, constant
from ridgeline.tensors.copies import repeats, strided_copy
from ridgeline.tensors.moving import (
    entries_of,
    is_elsewhere,
    move_nest,
    moves_itself,
    with_entries,
)

Leaf = tuple[torch.Size, torch.dtype] | str | TensorHolder
"""Shape and dtype of a tensor, the text of a constant, or an object that holds tensors itself."""

Signature = tuple[pytree.TreeSpec, tuple[Leaf, ...]]
"""Structure of a batch, and its leaves."""


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
    """The leading dimension that all tensors and arrays with dimensions share, also in dataclasses.

    Raises:
        BatchError: there is no such tensor, or they disagree.
    """
    sizes = [int(leaf.shape[0]) for leaf in _inner_leaves(batch) if _has_samples(leaf)]
    if not sizes or len(set(sizes)) > 1:
        raise BatchError(
            f"wanted a batch whose tensors share their leading dimension, got sizes {sizes or 'of none'}; "
            "put the samples along dimension 0 of every tensor"
        )
    return sizes[0]


def split(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """Micro-batches along dimension 0, each with its share of the samples.

    The shares make the weighted sum of mean losses the mean loss of the whole batch. Dataclasses, and classes
    derived from dict or list, are divided entry by entry.

    Raises:
        BatchError: fewer samples than parts, or an object that holds tensors and says nothing of samples.
    """
    if parts == 1:
        return [(batch, 1.0)]
    for leaf in _inner_leaves(batch):
        if not _has_samples(leaf) and _holds_tensors(leaf):
            raise BatchError(
                f"wanted tensors to divide into accumulate={parts} micro-batches, got a "
                f"{type(leaf).__name__} that holds tensors itself, of which nobody knows which belong to a "
                "sample; put the tensors into the batch, or use accumulate=1 with smaller batches"
            )
    total = num_samples(batch)
    if total < parts:
        raise BatchError(
            f"wanted at least accumulate={parts} samples in a batch, got {total}; lower accumulate"
        )
    # Sizes differ by one at most, and each sample is in one part.
    bounds = [total * index // parts for index in range(parts + 1)]

    def piece(start: int, end: int, leaf: Any) -> Any:
        if _has_samples(leaf):
            return leaf[start:end]
        entries = entries_of(leaf)
        if entries is not None:
            cut = partial(piece, start, end)
            return with_entries(leaf, {k: pytree.tree_map(cut, v) for k, v in entries.items()})
        return leaf  # a number beside the samples (a temperature) belongs to each part

    return [
        (pytree.tree_map(partial(piece, start, end), batch), (end - start) / total)
        for start, end in pairwise(bounds)
    ]


def _inner_leaves(nest: Any) -> Iterator[Any]:
    """The leaves, those of objects with entries in place of these; a tuple that moves itself is one."""
    for leaf in pytree.tree_leaves(nest, is_leaf=moves_itself):
        entries = None if isinstance(leaf, Tensor) else entries_of(leaf)
        if entries is None:
            yield leaf
        else:
            yield from _inner_leaves([*entries.values()])


def _has_samples(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, numpy.ndarray)) and leaf.ndim > 0


def _holds_tensors(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) and isinstance(constant(leaf), TensorHolder)


def signature(batch: Any) -> Signature:
    """What must stay equal for a captured step to be replayed on the batch."""
    flat, structure = pytree.tree_flatten(batch)
    described = tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else constant(leaf) for leaf in flat
    )
    return structure, described
