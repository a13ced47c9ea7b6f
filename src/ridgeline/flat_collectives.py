"""All-gather and reduce-scatter of flat tensors, whatever the installed torch calls them.

Source: torch 2.13 renames `all_gather_into_tensor` and `reduce_scatter_tensor`, and warns of the old names.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(whole: Tensor, share: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `whole` with the share of each worker, by rank; None is the group of the whole job."""
    _gather(whole, share, group=group)


def reduce_scatter(
    share: Tensor, whole: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM
) -> None:
    """Fill `share` with this worker's share of the sum of `whole`; None is the group of the whole job.

    Args:
        share: May be its place in `whole`.
        whole: As many shares as there are workers, by rank.
        group: Of the workers.
        op: Another reduction than the sum.
    """
    _reduce(share, whole, op=op, group=group)
