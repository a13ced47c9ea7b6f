"""A block that networks of tests hold several times, so that there are regions to compile one by one."""

import torch
from torch import Tensor, nn


class TanhBlock(nn.Module):
    """A square linear layer and a tanh."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))
