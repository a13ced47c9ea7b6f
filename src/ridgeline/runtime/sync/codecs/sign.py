"""Signs: one bit an element, and the mean magnitude of each block of a parameter's gradient.

Blocks never reach over two parameters: one without a gradient sends nothing then, whatever lies beside it,
and buckets may be cut in any way without a difference. A scale for a whole parameter is too coarse: with it a
perceptron on digits diverged at a learning rate at which it does not with 64 elements a block.

Source: Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., ICML 2019
(the mean magnitude as the scale, with error feedback).
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.plan import ALIGNMENT_BYTES
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Codec, Exchange
from ridgeline.runtime.sync.codecs.tiles import tiles
from ridgeline.synchronisation import OptionValue

_GATHERING = sum(1 << (56 - 7 * bit) for bit in range(8))


class _BlockCode:
    """The code of a bucket: a bit for each element, a scale for each block of them.

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
        cuts = tiles(num_granules * granule, granule, device)
        self._tiles = [(cut.start // granule, cut.stop // granule) for cut in cuts]
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
        self._signs = (bits & 1).float().mul_(2.0).sub_(1.0)  # of each byte

    def scales(self, values: Tensor) -> Tensor:
        """The mean magnitude in each block."""
        granules = values.view(-1, self._granule)
        sums = values.new_zeros(
            len(granules) + 1
        )  # one more stands for the granules that a block lacks
        for first, last in self._tiles:
            torch.sum(granules[first:last].abs(), 1, out=sums[first:last])
        return sums[self._members].sum(1) / self._counts

    def packed(self, values: Tensor) -> Tensor:
        """A bit for each element, eight a byte, the first in the lowest."""
        found = []
        for first, last in self._tiles:
            is_positive = values[self._granule * first : self._granule * last] >= 0
            # Eight bytes of 0 or 1 as one number: each bit is moved to its place in the highest byte, where
            # no two meet.
            eights = is_positive.view(torch.uint8).view(torch.int64)
            found.append(((eights * _GATHERING) >> 56).to(torch.uint8))
        return torch.cat(found)

    def decoded(self, scales: Tensor, packed: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Signs times the scale of each, tile by tile: which elements, and what they are.

        What lies between parameters, where nothing is sent, has a sign as well: see `fill_padding`.
        """
        every = scales[self._owners][:, None]
        width = self._granule // 8
        for first, last in self._tiles:
            signs = self._signs[packed[width * first : width * last].int()]
            found = signs.view(-1, self._granule) * every[first:last]
            yield slice(self._granule * first, self._granule * last), found.view(-1)

    def fill_padding(self, values: Tensor) -> None:
        """Make zero what lies between parameters."""
        values.index_fill_(0, self._padding, 0.0)


class Sign(Codec):
    """One bit an element; which of them are 0 is not sent, so that error feedback makes up for it.

    A block with one element that is no finite number arrives without one that is.
    """

    def __init__(self, options: Mapping[str, OptionValue]) -> None:
        super().__init__(options)
        self._codes: dict[int, _BlockCode] = {}

    def share(self, values: Tensor, mean: Tensor, exchange: Exchange, bucket: Bucket) -> None:
        """All gather scales and bits of each, in one tensor of bytes."""
        code = self._codes[bucket.index]
        scales = code.scales(values)
        coded = torch.cat((scales.view(torch.uint8), code.packed(values)))
        mean.zero_()
        for rank, row in enumerate(exchange.gather(coded)):
            # In memory of its own: rows of bytes do not all begin where a float may lie.
            told = row[: scales.nbytes].clone().view(torch.float32)
            for elements, decoded in code.decoded(told, row[scales.nbytes :]):
                mean[elements] += decoded
                if rank == exchange.rank:
                    values[elements] -= decoded
        for part in (mean, values):
            code.fill_padding(part)
        mean.div_(exchange.size)

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Find the blocks of each parameter."""
        self._codes = {
            bucket.index: _BlockCode(bucket, int(self.options["block"])) for bucket in buckets
        }
