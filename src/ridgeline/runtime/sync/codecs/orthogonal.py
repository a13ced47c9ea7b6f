"""Orthonormal columns, on the device and without a decision on the host."""

import torch
from torch import Tensor

_LEAST = 1e-6
"""Of a column's length: what is left of it beside the columns before is rounding below this.

Source: eight times the rounding of float32.
"""


def orthonormalised(columns: Tensor) -> Tensor:
    """The columns of each matrix made orthonormal in turn; zero where one is no more than those before it.

    Args:
        columns: [matrices, rows, columns], float32; few columns.

    Source: Gram-Schmidt, each column twice, which is enough (Giraud, Langou, Rozloznik, 2005).
    """
    done: list[Tensor] = []
    for number in range(columns.shape[2]):
        column = columns[:, :, number]
        wanted = _length(column)
        for _ in range(2 if done else 0):
            before = torch.stack(done, 2)
            along = torch.einsum("brc,br->bc", before, column)
            column = column - torch.einsum("brc,bc->br", before, along)
        length = _length(column)
        is_more = length > _LEAST * wanted
        # A NaN compares as false, and must arrive all the same.
        unit = torch.where(is_more | length.isnan(), column / length, torch.zeros_like(column))
        done.append(unit)
    return torch.stack(done, 2)


def _length(column: Tensor) -> Tensor:
    # Scaled first: squares of small gradients would be too small for float32.
    largest = column.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    return scale * (column / scale).square().sum(1, keepdim=True).sqrt()
