"""Sparse tensors without values that keep their number of entries.

torch's stand-ins for copies of sparse tensors have none: an optimizer that reads such a gradient would be
traced as doing nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

_LIKE = {
    aten.clone.default: 0,
    aten._coalesce.default: 0,  # noqa: SLF001 - it has no public name
    aten.sparse_mask.default: 1,
}
"""The argument that has as many entries as the result; coalescing keeps all where no index stands twice."""


def with_entries(func: OpOverload, args: Sequence[Any], result: Any) -> Any:
    """The result of an operator on fake tensors, with the entries that a real one has.

    Source: torch 2.11 to 2.13, whose fake results of these operators have no entries.
    """
    given: Tensor | None = args[_LIKE[func]] if func in _LIKE else None
    if given is None or given.layout is not torch.sparse_coo:
        return result
    return aten._sparse_coo_tensor_with_dims_and_tensors.default(  # noqa: SLF001
        given.sparse_dim(),
        given.dense_dim(),
        [*given.shape],
        torch.empty_like(given._indices()),  # noqa: SLF001 - `indices` demands what is being made
        torch.empty_like(given._values(), dtype=result.dtype),  # noqa: SLF001
        dtype=result.dtype,
        layout=torch.sparse_coo,
        device=given.device,
        is_coalesced=func is aten._coalesce.default or given.is_coalesced(),  # noqa: SLF001
    )
