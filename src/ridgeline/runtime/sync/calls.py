"""Collectives of torch on tensors of any type, since only bytes travel."""

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.workers import flat_collectives


def all_gather(part: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """[size, ...] of what each of `size` workers has, by rank."""
    found = part.new_empty((size, *part.shape))
    flat_collectives.all_gather(_bytes(found), _bytes(part.contiguous()), group)
    return found


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of [size, ...], row r of which goes to worker r: [size, ...] of what the workers have for this one."""
    found = torch.empty_like(rows, memory_format=torch.contiguous_format)
    flat_collectives.all_to_all(_bytes(found), _bytes(rows.contiguous()), group)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
