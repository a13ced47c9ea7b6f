"""Signs: one bit an element, and the mean magnitude of each parameter's gradient.

A scale for each parameter, and not one for blocks of the bucket: a parameter without a gradient sends nothing
then, whatever lies beside it, and buckets may be cut in any way without a difference.

Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., ICML 2019
(the mean magnitude as the scale, with error feedback).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.plan import ALIGNMENT_BYTES
from ridgeline.runtime.sync.buckets import Bucket
from ridgeline.runtime.sync.codec import Codec, Exchange
from ridgeline.synchronisation import OptionValue


class _Scales:
    """The scale of each parameter in a bucket.

    Parameters begin at multiples of some elements, a granule; so a scale belongs to whole granules.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._granule = ALIGNMENT_BYTES // bucket.payload.element_size()
        self._sizes = [view.numel() for view in bucket.views]
        start = bucket.payload.storage_offset()
        self._starts = [view.storage_offset() - start for view in bucket.views]
        ends = [*self._starts[1:], len(bucket.payload)]
        granules = [
            (end - begin) // self._granule for begin, end in zip(self._starts, ends, strict=True)
        ]
        owners = [
            torch.full((count,), number, dtype=torch.int64) for number, count in enumerate(granules)
        ]
        device = bucket.payload.device
        self._owners = torch.cat(owners).to(device)
        self._counts = torch.tensor([max(1, size) for size in self._sizes], device=device)

    def of(self, values: Tensor) -> Tensor:
        """The mean magnitude of each parameter, without what aligns it."""
        parts = [values[a : a + n] for a, n in zip(self._starts, self._sizes, strict=True)]
        norms = torch._foreach_norm(parts, 1)  # noqa: SLF001 - one launch for many, as torch clips
        return torch.stack(norms) / self._counts

    def times(self, scales: Tensor, signs: Tensor) -> Tensor:
        """Signs [elements] times the scale of each."""
        return (signs.view(-1, self._granule) * scales[self._owners][:, None]).view(-1)


class Sign(Codec):
    """One bit an element; which of them are 0 is not told, so that error feedback makes up for it.

    A parameter with one element that is no finite number arrives as such.
    """

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        super().__init__(options)
        self._scales: dict[int, _Scales] = {}
        self._bits: dict[torch.device, Tensor] = {}

    def share(self, values: Tensor, exchange: Exchange, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """All gather scales and bits of each, in one tensor of bytes."""
        known = self._scales[bucket.index]
        scales = known.of(values)
        coded = torch.cat((scales.view(torch.uint8), self._packed(values)))
        total, sent = torch.zeros_like(values), values
        for rank, row in enumerate(exchange.gather(coded)):
            told = row[: scales.nbytes].clone().view(torch.float32)
            signs = self._unpacked(row[scales.nbytes :])
            decoded = known.times(told, signs)
            total += decoded
            sent = decoded if rank == exchange.rank else sent
        return total.div_(exchange.size), sent

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Find where each parameter lies."""
        self._scales = {bucket.index: _Scales(bucket) for bucket in buckets}
        for bucket in buckets:
            bits = torch.arange(8, dtype=torch.uint8)
            self._bits[bucket.payload.device] = bits.to(bucket.payload.device)

    def _packed(self, values: Tensor) -> Tensor:
        bits = self._bits[values.device]
        is_positive = (values >= 0).view(-1, 8).to(torch.uint8)
        return (is_positive << bits).sum(1, dtype=torch.uint8)

    def _unpacked(self, packed: Tensor) -> Tensor:
        """1 or -1, float32."""
        ones = (packed[:, None] >> self._bits[packed.device]) & 1
        return ones.view(-1).float().mul_(2.0).sub_(1.0)
