"""Functions for TorchScript, whose compiler reads their source: `torch.jit.fork` starts a task."""

import torch
from torch import Tensor


def chain(x: Tensor, num: int) -> Tensor:
    """`num` products, each of the last one's result."""
    weight = x
    for _ in range(num):
        x = torch.tanh(x @ weight)
    return x


def product(x: Tensor) -> Tensor:
    """The square."""
    return x.mm(x)


def chains(a: Tensor, b: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Two chains, the first in a task of its own."""
    first = torch.jit.fork(chain, a, num)
    second = chain(b, num)
    return torch.jit.wait(first), second


def products(xs: list[Tensor]) -> list[Tensor]:
    """A task for every product."""
    tasks = [torch.jit.fork(product, x) for x in xs]
    return [torch.jit.wait(task) for task in tasks]
