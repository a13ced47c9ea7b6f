"""Sparse tensors that a program reads: how the compiler comes to read them, and where they lie."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.variables import builder

from ridgeline.reach.sparse import is_sparse, parts

_REFUSING = ("wrap_tensor", "handle_traced_output")
"""Functions of TorchDynamo that refuse a sparse tensor since what is compiled has no guards for its elements.
Nothing is compiled of a reading. Where others ask, it is about strides, which a sparse tensor has not."""
_is_sparse_any = builder.is_sparse_any


@contextlib.contextmanager
def sparse_tensors_read() -> Iterator[None]:
    """Inside, TorchDynamo takes sparse tensors as it takes others: by shape, dtype and layout."""

    def is_refused(value: Any) -> bool:
        asking = sys._getframe(1).f_code.co_name  # noqa: SLF001 - the documented way
        return asking not in _REFUSING and bool(_is_sparse_any(value))

    with mock.patch.object(builder, "is_sparse_any", is_refused):
        yield


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
