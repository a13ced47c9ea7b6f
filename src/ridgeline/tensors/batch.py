"""Batches: any nest of tuples, lists and dicts of tensors (and constants)."""

from collections import UserDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import BatchError
from ridgeline.tensors.constants import TensorHolder, constant
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
    """The batch in copies, as one program has it: one tensor in two places is two, and none has gaps."""
    return pytree.tree_map_only(Tensor, _own, batch)


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


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
            "put the samples along dimension 0 of every tensor (labels of all texts in one row, as for CTC: "
            "pad them to a row for each), or one dictionary for each into a list"
        )
    return sizes[0]


def split(batch: Any, parts: int) -> list[tuple[Any, float]]:
    """Micro-batches along dimension 0, each with its share of the samples.

    The shares make the weighted sum of mean losses the mean loss of the whole batch. Dataclasses, and classes
    derived from dict or list, are divided entry by entry, and so are lists of one text, or one dictionary of
    tensors, for each sample.

    Raises:
        BatchError: fewer samples than parts, or something that is not divided like the samples.
    """
    if parts == 1:
        return [(batch, 1.0)]
    num_listed = _num_listed(batch, parts)
    is_listed = partial(_is_listed, num_listed or 0)
    _check_tensors(batch, parts, is_listed)
    total = num_listed or num_samples(batch)
    if total < parts:
        raise BatchError(
            f"wanted at least accumulate={parts} samples in a batch, got {total}; lower accumulate"
        )
    _check_lists(batch, parts, total, is_listed)
    # Sizes differ by one at most, and each sample is in one part.
    bounds = [total * index // parts for index in range(parts + 1)]

    def is_divided(nest: Any) -> bool:
        """One entry for each sample: a dictionary, or a text (the name of a file), as loaders make them."""
        return is_listed(nest) or (_is_list_of(nest, str) and len(nest) == total)

    def piece(start: int, end: int, leaf: Any) -> Any:
        if _has_samples(leaf) or is_divided(leaf):
            return leaf[start:end]
        entries = entries_of(leaf)
        if entries is not None:
            cut = partial(piece, start, end)
            divided = {k: pytree.tree_map(cut, v, is_leaf=is_divided) for k, v in entries.items()}
            return with_entries(leaf, divided)
        return leaf  # a number beside the samples (a temperature) belongs to each part

    return [
        (
            pytree.tree_map(partial(piece, start, end), batch, is_leaf=is_divided),
            (end - start) / total,
        )
        for start, end in pairwise(bounds)
    ]


def _num_listed(batch: Any, parts: int) -> int | None:
    """The number of samples where dictionaries of tensors in a list have one each; None where they do not.

    What stands beside them decides, and not how many rows they have (boxes of an image), which changes from
    batch to batch and may be the number of samples by chance.
    """
    lists = [nest for nest in _inner_leaves(batch, _is_of_dicts) if _is_of_dicts(nest)]
    if len({len(nest) for nest in lists}) != 1:
        return None
    listed = len(lists[0])
    leaves = [*_inner_leaves(batch, partial(_is_listed, listed))]
    beside = {int(leaf.shape[0]) for leaf in leaves if _has_samples(leaf)}
    if beside:
        return listed if beside == {listed} else None
    sizes = {int(leaf.shape[0]) for leaf in _inner_leaves(batch) if _has_samples(leaf)}
    if len(sizes) != 1:
        return listed
    if any(_is_listed(listed, leaf) and not _is_of_dicts(leaf) for leaf in leaves):
        raise BatchError(
            f"wanted a batch that shows what belongs to a sample, to divide into accumulate={parts} "
            f"micro-batches, got lists of {listed} dictionaries and of {listed} tensors, all of which have "
            f"{sizes.pop()} rows, where lists or rows may be the samples; stack the tensors, or use "
            "accumulate=1 with smaller batches"
        )
    return None


def _is_listed(num_samples: int, nest: Any) -> bool:
    """A list or tuple of one dictionary of tensors, or one tensor, for each sample."""
    if type(nest) not in (list, tuple) or len(nest) != num_samples:
        return False
    if _is_of_dicts(nest):
        return True
    if not nest or not all(map(_has_samples, nest)):
        return False
    # The same kind, as images are: a tuple of inputs and lengths is no list of samples.
    is_alike = len({(leaf.dtype, leaf.ndim) for leaf in nest}) == 1
    return is_alike and any(leaf.shape[0] != num_samples for leaf in nest)


def _is_of_dicts(nest: Any) -> bool:
    if type(nest) not in (list, tuple) or not nest:
        return False
    arrays = (Tensor, numpy.ndarray)
    return all(
        isinstance(entry, (dict, UserDict))
        and any(isinstance(leaf, arrays) for leaf in _inner_leaves(entry))
        for entry in nest
    )


def _check_tensors(batch: Any, parts: int, is_listed: Callable[[Any], bool]) -> None:
    wanted = f"wanted tensors to divide into accumulate={parts} micro-batches, got"
    for leaf in _inner_leaves(batch, is_listed):
        if is_listed(leaf):
            continue
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.is_nested:
                layout = str(leaf.layout).removeprefix("torch.")
                raise BatchError(
                    f"{wanted} one of layout {layout}, whose samples cannot be cut out; make it dense, or "
                    "use accumulate=1 with smaller batches"
                )
        elif not _has_samples(leaf) and _holds_tensors(leaf):
            raise BatchError(
                f"{wanted} a {type(leaf).__name__} that holds tensors itself, of which nobody knows which "
                "belong to a sample; put the tensors into the batch, or use accumulate=1 with smaller batches"
            )


def _check_lists(batch: Any, parts: int, total: int, is_listed: Callable[[Any], bool]) -> None:
    """Refuse a list that has one number for each sample, or that many by chance: either guess may be wrong.

    A loader makes tensors of numbers, and lists of texts alone.
    """
    is_numbers = partial(_is_list_of, kind=int | float)
    for leaf in _inner_leaves(batch, lambda nest: is_numbers(nest) or is_listed(nest)):
        if is_numbers(leaf) and len(leaf) == total:
            raise BatchError(
                f"wanted what belongs to a sample as tensors or arrays to divide into accumulate={parts} "
                f"micro-batches, got a list of {total} numbers such as {leaf[0]!r} beside {total} samples; "
                "make it an array, which is divided, or a tuple, which each part gets whole"
            )


def _is_list_of(nest: Any, kind: Any) -> bool:
    return type(nest) is list and bool(nest) and all(isinstance(value, kind) for value in nest)


def _inner_leaves(nest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """The leaves, those of objects with entries in place of these; a tuple that moves itself is one."""

    def ends(part: Any) -> bool:
        return moves_itself(part) or (is_leaf is not None and is_leaf(part))

    for leaf in pytree.tree_leaves(nest, is_leaf=ends):
        entries = None if isinstance(leaf, Tensor) or type(leaf) is list else entries_of(leaf)
        if entries is None:
            yield leaf
        else:
            yield from _inner_leaves((*entries.values(),), is_leaf)


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
