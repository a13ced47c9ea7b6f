"""How sparse tensors lie in memory: by indices and values, without strides."""

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def is_sparse(tensor: Tensor) -> bool:
    """Whether it is made of indices and values, in any of torch's layouts for that."""
    return tensor.layout in (torch.sparse_coo, *_BY_ROWS, *_BY_COLUMNS)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Strides; a sparse tensor has none."""
    return () if is_sparse(tensor) else tensor.stride()


def parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors of which one is made, in its own memory: indices and values, or itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # noqa: SLF001 - the public ones want it coalesced
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in _BY_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)
