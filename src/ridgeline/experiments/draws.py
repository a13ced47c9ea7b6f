"""Made-up batches and weights: a batch is drawn on the CPU from a generator, the same for the same seed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Draw = Callable[[torch.Generator], Any]
"""Draws a batch."""


def labelled(*shape: int, classes: int) -> Draw:
    """Draws normal values of a shape, and a label for each of its first axis."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        values = torch.randn(shape, generator=generator)
        return values, torch.randint(0, classes, shape[:1], generator=generator)

    return draw


def images(count: int, side: int, classes: int) -> Draw:
    """Draws images [count, 3, side, side] and a label for each."""
    return labelled(count, 3, side, side, classes=classes)


def next_tokens(count: int, length: int, vocabulary: int) -> Draw:
    """Draws tokens [count, length], and the token that follows each."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        # One token more, so that inputs and targets are two ends of the same window.
        window = torch.randint(0, vocabulary, (count, length + 1), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return draw


@contextlib.contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """The random state of seed 0 inside, and as it was afterwards."""
    devices: list[int] = []
    if device.type == "cuda":
        devices = [torch.cuda.current_device() if device.index is None else device.index]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        yield
