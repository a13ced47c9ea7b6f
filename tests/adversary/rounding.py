"""Plain PyTorch with every result rounded otherwise: how far from it a right mode may come.

Differences that programs amplify (a saturated tanh, sums that cancel under batch norm) show no constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SEEDS = (1, 2, 3)
"""Of the runs that show what rounding does."""


class OtherRounding(TorchDispatchMode):
    """Every result of an operator that computes something moves by up to one unit in its last place.

    Args:
        seed: Of the directions; the random numbers of the program are not touched.

    Source: Vignes, "A stochastic arithmetic for reliable scientific computation" (1993).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if not schema.is_mutable and all(r.alias_info is None for r in schema.returns):
            for leaf in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    self._move(leaf)
        return result

    def _move(self, tensor: Tensor) -> None:
        drawn = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64)
        move = (2.0 * drawn - 1.0).to(tensor.device) * torch.finfo(tensor.dtype).eps
        tensor.copy_(tensor.double() * (1.0 + move))
