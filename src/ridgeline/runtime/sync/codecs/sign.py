"""Signs: one bit an element, and the mean magnitude of each block of a parameter's gradient.

Blocks never reach over two parameters: one without a gradient sends nothing then, whatever lies beside it,
and buckets may be cut in any way without a difference. A scale for a whole parameter is too coarse: with it a
perceptron on digits diverged at a learning rate at which it does not with 64 elements a block.

Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., ICML 2019
(the mean magnitude as the scale, with error feedback).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.plan import ALIGNMENT_BYTES
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Codec, Exchange
from ridgeline.synchronisation import OptionValue


class _Scales:
    """The scales of a bucket: which elements each of them is of.

    Parameters begin at multiples of some elements, a granule; so a scale belongs to whole granules.

    Args:
        bucket: Its payload is laid out in granules.
        block: Elements with one scale; whole granules.
    """

    def __init__(self, bucket: Bucket, block: int) -> None:
        self._granule = granule = ALIGNMENT_BYTES // bucket.payload.element_size()
        start, device = bucket.payload.storage_offset(), bucket.payload.device
        num_granules = len(bucket.payload) // granule
        width = block // granule
        members: list[Tensor] = []
        counts: list[Tensor] = []
        padding: list[Tensor] = []
        for view in bucket.views:
            first, size = view.storage_offset() - start, view.numel()
            last = first + -(-size // granule) * granule
            num_blocks = -(-size // block)
            found = torch.arange(num_blocks * width, device=device) + first // granule
            found.masked_fill_(found >= last // granule, num_granules)
            members.append(found.view(num_blocks, width))
            left = size - torch.arange(num_blocks, device=device) * block
            counts.append(left.clamp_(max=block))
            padding.append(torch.arange(int(first + size), int(last), device=device))
        grid = torch.cat(members)
        owners = torch.zeros(num_granules + 1, dtype=torch.int64, device=device)
        owners[grid] = torch.arange(len(grid), device=device)[:, None].expand_as(grid)
        self._owners, self._members = owners[:num_granules], grid
        self._counts = torch.cat(counts).float()
        self._padding = torch.cat(padding)

    def of(self, values: Tensor) -> Tensor:
        """The mean magnitude in each block."""
        sums = values.abs().view(-1, self._granule).sum(1)
        # One more stands for the granules that a block lacks.
        sums = torch.cat((sums, sums.new_zeros(1)))
        return sums[self._members].sum(1) / self._counts

    def times(self, scales: Tensor, signs: Tensor) -> Tensor:
        """Signs [elements] times the scale of each; zero between parameters, where nothing is sent."""
        found = signs.view(-1, self._granule) * scales[self._owners][:, None]
        return found.view(-1).index_fill_(0, self._padding, 0.0)


class Sign(Codec):
    """One bit an element; which of them are 0 is not sent, so that error feedback makes up for it.

    A block with one element that is no finite number arrives without one that is.
    """

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        super().__init__(options)
        self._scales: dict[int, _Scales] = {}
        self._bits: dict[torch.device, Tensor] = {}

    def share(self, values: Tensor, mean: Tensor, exchange: Exchange, bucket: Bucket) -> None:
        """All gather scales and bits of each, in one tensor of bytes."""
        known = self._scales[bucket.index]
        scales = known.of(values)
        coded = torch.cat((scales.view(torch.uint8), self._packed(values)))
        mean.zero_()
        for rank, row in enumerate(exchange.gather(coded)):
            # In memory of its own: rows of bytes do not all begin where a float may lie.
            told = row[: scales.nbytes].clone().view(torch.float32)
            signs = self._unpacked(row[scales.nbytes :])
            decoded = known.times(told, signs)
            mean += decoded
            if rank == exchange.rank:
                values.sub_(decoded)
        mean.div_(exchange.size)

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Find the blocks of each parameter."""
        self._scales = {
            bucket.index: _Scales(bucket, int(self.options["block"])) for bucket in buckets
        }
        for bucket in buckets:
            device = bucket.payload.device
            self._bits[device] = torch.arange(8, dtype=torch.uint8, device=device)

    def _packed(self, values: Tensor) -> Tensor:
        bits = self._bits[values.device]
        is_positive = (values >= 0).view(-1, 8).to(torch.uint8)
        return (is_positive << bits).sum(1, dtype=torch.uint8)

    def _unpacked(self, packed: Tensor) -> Tensor:
        """1 or -1, float32."""
        ones = (packed[:, None] >> self._bits[packed.device]) & 1
        return ones.view(-1).float().mul_(2.0).sub_(1.0)
