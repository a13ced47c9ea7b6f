"""A codec as a user adds one: this file, and its entry at the end."""

import torch
from torch import Tensor

from ridgeline.runtime.sync.codecs.exchanges import Parts, RowCodec
from ridgeline.synchronisation import COMPRESSIONS, Compression, MemoryPasses


class Coarse(RowCodec):
    """Sixteenths of the largest element of a row, in a byte each."""

    def encode(self, rows: Tensor) -> Parts:
        """Bytes, and a scale a row."""
        scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-30) / 16
        return (rows / scale).round().to(torch.int8), scale

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        """Multiples of the scale."""
        steps, scale = parts
        return steps.float() * scale


ENTRY = Compression(
    name="coarse",
    label="coarse",
    wire_bytes=lambda elements, size, workers, options: elements + 4 * workers,
    codec="toy_codec:Coarse",
    devices=("cpu", "cuda"),
    codec_passes=MemoryPasses(2.25, 1.25),
    exchange="scatter",
    state_bytes=lambda elements, size, options: 4 * elements,
)
COMPRESSIONS[ENTRY.name] = ENTRY
