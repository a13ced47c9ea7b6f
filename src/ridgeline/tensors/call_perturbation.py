"""Changing what a callable is given and what it reads, to see whether another form of it follows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.tensors.copies import strided_copy

LOW, HIGH = 1.0625, 1.25
"""Parameters are multiplied by factors that go from HIGH to LOW over their elements: neither their sums nor
their ratios stay as they were."""
MOST_BITS = 2
"""Last bits, at most, by which an element is moved to find what is rounding."""


def perturbed_inputs(args: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    """The example as it is, rolled, scaled with the sign turned, or random values in its range."""
    generator = torch.Generator().manual_seed(index)

    def change(tensor: Tensor) -> Tensor:
        if index == 0 or tensor.numel() == 0:
            return tensor
        if index == 1:
            return tensor.flatten().roll(1).view(tensor.shape)
        if index == 2 and (tensor.is_floating_point() or tensor.is_complex()):
            return tensor * -0.5
        if tensor.is_complex():
            return tensor * 0.75
        if tensor.is_floating_point():
            low, high = float(tensor.min()), float(tensor.max())
            # On the CPU, as generators of GPUs give other numbers on other models.
            share = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu")
            drawn = low + (high - low) * share
        elif tensor.dtype == torch.bool:
            drawn = torch.rand(tensor.shape, generator=generator, device="cpu") < 0.5
        else:
            # They may be indices: outside of the range that the example has, they could point beyond a table.
            bounds = int(tensor.min()), int(tensor.max()) + 1
            drawn = torch.randint(*bounds, tensor.shape, generator=generator, device="cpu")
        return drawn.to(tensor.device, tensor.dtype)

    def changed(tensor: Tensor) -> Tensor:
        return laid_out_as(tensor, change(tensor))

    return pytree.tree_map_only(Tensor, changed, args)


def perturb_tensors(tensors: Sequence[Tensor]) -> None:
    """Multiply every floating tensor in place by factors that differ between its elements."""
    for tensor in tensors:
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        factors = torch.linspace(
            HIGH, LOW, tensor.numel(), device=tensor.device, dtype=torch.float32
        )
        tensor.mul_(factors.view(tensor.shape).to(tensor.dtype))


def laid_out_as(example: Tensor, tensor: Tensor) -> Tensor:
    """The tensor with the strides of the example, which programs may ask for."""
    if tensor.layout != torch.strided or tensor.stride() == example.stride():
        return tensor
    return strided_copy(example).copy_(tensor)


def nudge(tensors: Sequence[Tensor], number: int) -> None:
    """Move elements of floating tensors in place by last bits, each by its own; alike for one `number`."""
    generator = torch.Generator().manual_seed(number)
    for tensor in tensors:
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            continue
        bits = torch.randint(
            -MOST_BITS, MOST_BITS + 1, tensor.shape, generator=generator, device="cpu"
        )
        factors = 1.0 + bits.double() * torch.finfo(tensor.dtype).eps
        tensor.copy_((tensor.double() * factors.to(tensor.device)).to(tensor.dtype))
