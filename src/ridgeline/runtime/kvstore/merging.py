"""Sums in a fixed order: of what the devices of one process push, and of what workers bring."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merged(values: Sequence[Tensor], device: torch.device, *, borrows: bool = False) -> Tensor:
    """The sum, on `device`, in memory of its own: what was pushed may be overwritten once this returns.

    Where it `borrows`, a single value that lies there already is the sum itself.

    Numbers of 16 bits are added up in float32 and rounded once. Sparse rows stay sparse unless a dense
    tensor is among them; each row comes once.
    """
    if all(value.is_sparse for value in values):
        return _merged_rows(values, device)
    dense = [value.to_dense() if value.is_sparse else value for value in values]
    first, *others = dense
    if not others:
        return first.to(device, copy=not borrows, memory_format=torch.contiguous_format)
    wide = _wide(first)
    total = first.to(device, wide, copy=True, memory_format=torch.contiguous_format)
    for other in others:
        total += other.to(device)
    return total.to(first.dtype)


def summed_rows(brought: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The numbers of all rows that are brought, each once, and their sums in the order of who brings them.

    Args:
        brought: Numbers, none of them twice, and the rows with these numbers; at least one such pair.
    """
    numbers = torch.cat([ids for ids, _ in brought]).unique()
    like = brought[0][1]
    wide = _wide(like)
    summed = like.new_zeros(len(numbers), *like.shape[1:], dtype=wide)
    for ids, rows in brought:  # what coalesces all at once adds up in no order that is told
        summed[torch.searchsorted(numbers, ids)] += rows.to(wide)
    return numbers, summed.to(like.dtype)


def rows_tensor(numbers: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows as a coalesced tensor; their numbers rise and are those of rows."""
    return torch.sparse_coo_tensor(
        numbers[None], rows, [*shape], is_coalesced=True, check_invariants=False
    )


def _merged_rows(values: Sequence[Tensor], device: torch.device) -> Tensor:
    rows = [value.to(device).coalesce() for value in values]
    numbers, summed = summed_rows([(one.indices()[0], one.values()) for one in rows])
    return rows_tensor(numbers, summed, values[0].shape)


def _wide(value: Tensor) -> torch.dtype:
    """The type in which such values are added up."""
    is_narrow = value.is_floating_point() and value.element_size() < 4
    return torch.float32 if is_narrow else value.dtype
