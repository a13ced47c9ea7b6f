"""Sparse tensors that a program reads: what of their layout is compared, and where they lie."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.reach.sparse import is_sparse, parts


def leave_out_strides(shapes: Mapping[Any, Any]) -> None:
    """Have guards not compare the strides that the compiler makes up for sparse tensors.

    Args:
        shapes: Of all that a program takes, by source, as the compiler is about to make guards of them.
    """
    for shape in shapes.values():
        if "values_size" in shape:
            shape["stride"] = (None,) * len(shape["size"])


def address(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, in which layout; a sparse one with what else its operators go by."""
    if not is_sparse(tensor):
        return (tensor.data_ptr(),)
    # Only COO tensors can be uncoalesced; others raise when they are asked.
    is_coalesced = tensor.layout is not torch.sparse_coo or tensor.is_coalesced()
    return tensor.layout, is_coalesced, *((p.data_ptr(), tuple(p.shape)) for p in parts(tensor))
