"""Gradients in 16 or 8 bits, with one scale for each block of them.

A scale a block keeps what one large element costs the others of a bucket within its block, and nothing can
overflow. Scale and elements travel in one tensor of bytes, so that an exchange is one collective.

Source: Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022 (blocks); Wang et al.,
"ZeRO++", 2023 (quantised gradients by all-to-all, added up in full precision).
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ridgeline.runtime.sync.codecs.exchanges import Parts, RowCodec
from ridgeline.synchronisation import OptionValue

_TINY = torch.finfo(torch.float32).tiny


class Blocks(RowCodec):
    """Elements of `dtype`, each block scaled so that its largest element is near the largest of the type.

    A block with one element that is no finite number arrives as NaN.
    """

    dtype: ClassVar[torch.dtype]
    most: ClassVar[float]
    """The largest magnitude of the type."""

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        super().__init__(options)
        self.block = int(self.options["block"])

    def encode(self, rows: Tensor) -> Parts:
        """Bytes [rows, scales and elements]; the row is whole blocks, or one that is smaller."""
        blocks = self._blocks(rows)
        scales = self._scales(blocks.abs().amax(2, keepdim=True))
        elements = self._rounded(blocks / scales)
        scale_bytes = scales.flatten(1).view(torch.uint8)
        return (torch.cat((scale_bytes, elements.flatten(1).view(torch.uint8)), 1),)

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        """Elements times their scales."""
        (coded,) = parts
        num_scales = -(-num_elements // self.block)
        scale_bytes, elements = coded.split(
            [4 * num_scales, coded.shape[1] - 4 * num_scales], dim=1
        )
        # In memory of their own: where they lie they need not be aligned.
        scales = torch.empty_like(scale_bytes, memory_format=torch.contiguous_format)
        scales = scales.copy_(scale_bytes).view(torch.float32)
        values = elements.reshape(-1).view(self.dtype).float()
        blocks = self._blocks(values.view(len(coded), num_elements))
        return (blocks * scales[:, :, None]).flatten(1)

    def _blocks(self, rows: Tensor) -> Tensor:
        num_rows, num_elements = rows.shape
        block = min(self.block, num_elements)
        return rows.view(num_rows, num_elements // block, block)

    def _scales(self, largest: Tensor) -> Tensor:
        """By what the blocks are divided, of the largest magnitude in each."""
        return (largest / self.most).clamp_min(_TINY)

    def _rounded(self, scaled: Tensor) -> Tensor:
        return scaled.to(self.dtype)


class Int8(Blocks):
    """255 even steps: loses at most half a step, 1 part in 254 of the largest element of the block."""

    dtype = torch.int8
    most = 127.0

    def _rounded(self, scaled: Tensor) -> Tensor:
        return scaled.round().to(torch.int8)


class _Floating(Blocks):
    """Scaled by a power of two, which is exact: what the type can hold arrives as it is."""

    def _scales(self, largest: Tensor) -> Tensor:
        scales = super()._scales(largest)
        exponents = torch.frexp(scales).exponent  # rounded up; of no finite number it means nothing
        powers = torch.ldexp(torch.ones_like(scales), exponents)
        return torch.where(scales.isfinite(), powers, scales)


class Float16(_Floating):
    """Loses at most 1 part in 2048 of an element, and of tiny ones 2^-39 of the largest of their block."""

    dtype = torch.float16
    most = 65504.0


class Float8(_Floating):
    """e4m3: loses at most 1 part in 16 of an element, and of tiny ones 2^-17 of the largest of a block."""

    dtype = torch.float8_e4m3fn
    most = 448.0
