"""Sums in a fixed order: of what the devices of one process push, and of what workers bring."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.tensors.row_sums import rows_tensor, summed_rows, wide_type


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
    wide = wide_type(first)
    total = first.to(device, wide, copy=True, memory_format=torch.contiguous_format)
    # One after the other: `stack` and `sum` add in an order of their own.
    for other in others:
        total += other.to(device)
    return total.to(first.dtype)


def _merged_rows(values: Sequence[Tensor], device: torch.device) -> Tensor:
    rows = [value.to(device).coalesce() for value in values]
    numbers, summed = summed_rows([(one.indices()[0], one.values()) for one in rows])
    return rows_tensor(numbers, summed, values[0].shape)
