"""Sums of sparse rows in a fixed order, and tensors of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor


def summed_rows(brought: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The numbers of all rows that are brought, each once, and their sums in the order of who brings them.

    Numbers of 16 bits are added up in float32 and rounded once.

    Args:
        brought: Numbers, none of them twice, and the rows with these numbers; at least one such pair.
    """
    numbers = torch.cat([ids for ids, _ in brought]).unique()
    like = brought[0][1]
    wide = wide_type(like)
    summed = like.new_zeros(len(numbers), *like.shape[1:], dtype=wide)
    for ids, rows in brought:  # what coalesces all at once adds up in no defined order
        # Safe without `index_add_`, as no number stands twice in one part.
        summed[torch.searchsorted(numbers, ids)] += rows.to(wide)
    return numbers, summed.to(like.dtype)


def rows_tensor(numbers: Tensor, rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows as a coalesced tensor; their numbers rise and are those of rows."""
    return torch.sparse_coo_tensor(
        numbers[None], rows, [*shape], is_coalesced=True, check_invariants=False
    )


def wide_type(value: Tensor) -> torch.dtype:
    """The type in which such values are added up."""
    is_narrow = value.is_floating_point() and value.element_size() < 4
    return torch.float32 if is_narrow else value.dtype
