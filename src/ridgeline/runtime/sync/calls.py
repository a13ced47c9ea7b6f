"""Collectives of torch under the names that each version has, on flat tensors of any type.

Source: torch 2.13 renames `all_gather_into_tensor` and `reduce_scatter_tensor`, and warns of the old names.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(part: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """[size, ...] of what each of `size` workers has, by rank; of any type, since only bytes travel."""
    found = part.new_empty((size, *part.shape))
    _gather(_bytes(found), _bytes(part.contiguous()), group=group)
    return found


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of [size, ...], row r of which goes to worker r: [size, ...] of what the workers have for this one."""
    found = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(_bytes(found), _bytes(rows.contiguous()), group=group)
    return found


def reduce_scatter(share: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduce `whole`, one-dimensional, and give each worker its share of the result."""
    _reduce_scatter(share, whole, op=op, group=group)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
