"""Programs whose independent parts fit on one GPU at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)


def chains(
    width: int = 4, depth: int = 8, size: int = 256
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Independent chains of small products, which leave most of the device to one another."""
    torch.manual_seed(0)
    weights = [torch.randn(size, size, device=DEVICE) / size**0.5 for _ in range(width)]

    def fn(x: Tensor) -> Tensor:
        found = []
        for weight in weights:
            y = x
            for _ in range(depth):
                y = (y @ weight).tanh()
            found.append(y)
        return torch.stack(found).sum(0)

    return fn, (torch.randn(size, size, device=DEVICE),)


def same(got: Any, want: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
