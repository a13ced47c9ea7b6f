"""Gradients sent in bfloat16 and added up in float32."""

import torch
from torch import Tensor

from ridgeline.runtime.sync.codecs.exchanges import Parts, RowCodec


class BFloat16(RowCodec):
    """Half the bytes, the range of float32, and 8 bits of its 24; no scale is needed.

    Rounding loses at most 1 part in 256 of an element. Sums are in float32, so that what is lost does not
    grow with the number of workers as it does in an all-reduce of bfloat16.
    """

    def encode(self, rows: Tensor) -> Parts:
        """Rounded to the nearest."""
        return (rows.to(torch.bfloat16),)

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        """As it was rounded."""
        return parts[0].float()
