"""Batches of a data set: collated, made by its own `batch`, or several at once where the result is the same.

A batch of a few thousand bytes costs more in operators than in bytes. A data set whose `is_pure` is true says
that a sample depends on its index alone (it draws no random numbers), and that the leaves of a batch hold its
samples along their first dimension; then the indices of several batches are taken in one go.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, TensorDataset, default_collate

BLOCK_BYTES = 256 << 10
"""Batches taken at once hold no more: the last of them is still in the core's cache when its turn comes."""
MOST_BATCHES = 16


def fetch(dataset: Dataset[Any], indices: Tensor) -> Any:
    """The collated batch of some samples: by the data set's own `batch(indices)` where it has one.

    Args:
        dataset: Map-style.
        indices: int64 [N].
    """
    batch = getattr(dataset, "batch", None)
    if callable(batch):
        return batch(indices)
    if _is_in_memory(dataset):  # what torch's collation makes of it, without a loop over samples
        return [tensor.index_select(0, indices) for tensor in dataset.tensors]
    return default_collate([dataset[index] for index in indices.tolist()])


def batches(dataset: Dataset[Any], slices: Iterable[Tensor]) -> Iterator[Any]:
    """The batches of some slices of indices, in order, each with the values that `fetch` gives.

    Args:
        dataset: Map-style; where its `is_pure` is true, small batches are taken several at once.
        slices: int64 [N] each.
    """
    rest = iter(slices)
    count = 1
    if getattr(dataset, "is_pure", False) or _is_in_memory(dataset):
        indices = next(rest, None)
        if indices is None:
            return
        # Alone: only a batch tells how many of its kind fit a block.
        batch = fetch(dataset, indices)
        count = _num_at_once(batch, len(indices))
        yield batch
        del batch  # who drops a batch is to find its memory free
    while block := list(itertools.islice(rest, count)):
        if len(block) == 1:
            yield fetch(dataset, block[0])
        else:
            whole = fetch(dataset, torch.cat(block))
            yield from _parts(whole, [len(indices) for indices in block])
            del whole


def _parts(whole: Any, sizes: list[int]) -> Iterator[Any]:
    """Batches of some sizes that share the memory of one."""
    leaves, structure = pytree.tree_flatten(whole)
    for parts in zip(*(leaf.split(sizes) for leaf in leaves), strict=True):
        yield pytree.tree_unflatten(parts, structure)


def _num_at_once(batch: Any, samples: int) -> int:
    """Batches like this one that are taken together; 1 where its leaves cannot be cut into samples."""
    leaves = pytree.tree_leaves(batch)
    if not all(isinstance(x, Tensor) and x.dim() and len(x) == samples for x in leaves):
        return 1
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    return max(1, min(BLOCK_BYTES // max(1, num_bytes), MOST_BATCHES))


def _is_in_memory(dataset: Dataset[Any]) -> TypeGuard[TensorDataset]:
    """Whether the data set is nothing but plain tensors of the host."""
    # The exact classes, since a subclass may do more in `__getitem__` than index.
    return type(dataset) is TensorDataset and all(
        type(x) is Tensor and x.device.type == "cpu" and x.layout is torch.strided
        for x in dataset.tensors
    )
