"""Codecs of rows of numbers, and how encoded payloads are exchanged (`Compression.exchange_among`).

    sum      they can be added up: the plan's algorithm makes their mean
    scatter  each worker gets its share of every payload, adds up in single precision, encodes the mean, and
             all gather the shares: what is sent does not grow with the number of workers
    swap     two workers give each other all shares: as many bytes as `scatter` sends, in one collective
    gather   every worker gets all payloads and decodes each

Each writes the mean over the workers, and leaves of the values what this worker has not contributed to it.

Source of `scatter`: Wang et al., "ZeRO++", 2023 (quantised gradients by all-to-all).
"""

import abc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Codec, Exchange
from ridgeline.runtime.sync.codecs.tiles import Shares
from ridgeline.synchronisation import ExchangeKind

Parts = tuple[Tensor, ...]
"""A payload encoded: tensors of fixed shapes, of which the first dimension is that of the rows."""


class RowCodec(Codec):
    """Encodes rows of numbers into fewer bytes, and back.

    Attributes:
        block: Elements that share something encoded: shares of a payload that are larger are whole blocks.
    """

    block: int = 1

    @abc.abstractmethod
    def encode(self, rows: Tensor) -> Parts:
        """What is sent instead of `rows`, float32 [rows, elements]; each row can be decoded by itself."""

    @abc.abstractmethod
    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        """What the other side makes of it: float32 [rows, elements]."""

    def share(self, values: Tensor, mean: Tensor, exchange: Exchange, bucket: Bucket) -> None:
        """By the kind of exchange that the entry names."""
        EXCHANGES[exchange.kind](self, values, mean, exchange)


def by_sum(codec: RowCodec, values: Tensor, mean: Tensor, exchange: Exchange) -> None:
    """The mean of the encoded payloads, decoded."""
    parts = codec.encode(values[None])
    values.sub_(codec.decode(parts, values.numel())[0])
    # Copied, since what was sent may be a view of the parts.
    means = tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
    for part in means:
        exchange.mean(part.view(-1))
    mean.copy_(codec.decode(means, values.numel())[0])


def by_gather(codec: RowCodec, values: Tensor, mean: Tensor, exchange: Exchange) -> None:
    """The mean of all payloads, decoded one by one: at once they would take as many buckets of memory."""
    parts = codec.encode(values[None])
    gathered = _gathered(parts, exchange)
    mean.zero_()
    for rank in range(exchange.size):
        row = codec.decode(tuple(part[rank : rank + 1] for part in gathered), values.numel())[0]
        mean += row
        if rank == exchange.rank:
            values.sub_(row)
    mean.div_(exchange.size)


def by_scatter(codec: RowCodec, values: Tensor, mean: Tensor, exchange: Exchange) -> None:
    """The encoded means of equal shares, one a worker; the last share is filled up."""
    shares = Shares(values.numel(), exchange.size, codec.block)
    cuts = shares.tiles(values.device)
    sent = [codec.encode(shares.rows(values, cut)) for cut in cuts]
    heard = _parted(tuple(map(exchange.scatter, _joined(sent))), sent)
    own = [codec.decode(part, len(cut)).mean(0) for cut, part in zip(cuts, heard, strict=True)]
    told = [codec.encode(part[None]) for part in own]
    gathered = _parted(_gathered(_joined(told), exchange), told)
    for cut, mine, ours, all_shares in zip(cuts, sent, own, gathered, strict=True):
        shares.subtract(values, cut, codec.decode(mine, len(cut)))
        rows = codec.decode(all_shares, len(cut))
        shares.write(mean, cut, rows)
        # What rounding the mean of its share lost, its owner makes up for: for all workers at once.
        left = shares.row(values, exchange.rank, cut)
        left.add_((ours - rows[exchange.rank])[: len(left)], alpha=exchange.size)


def by_swap(codec: RowCodec, values: Tensor, mean: Tensor, exchange: Exchange) -> None:
    """The mean of the encoded payloads, laid out as for `by_scatter`; it is not encoded again."""
    shares = Shares(values.numel(), exchange.size, codec.block)
    cuts = shares.tiles(values.device)
    sent = [codec.encode(shares.rows(values, cut)) for cut in cuts]
    for cut, parts in zip(cuts, _parted(_gathered(_joined(sent), exchange), sent), strict=True):
        by_worker = codec.decode(parts, len(cut)).view(exchange.size, exchange.size, len(cut))
        shares.subtract(values, cut, by_worker[exchange.rank])
        shares.write(mean, cut, by_worker.mean(0))


EXCHANGES: dict[ExchangeKind, Callable[[RowCodec, Tensor, Tensor, Exchange], None]] = {
    "sum": by_sum,
    "scatter": by_scatter,
    "swap": by_swap,
    "gather": by_gather,
}
"""The exchange of each kind: `(codec, values, mean, exchange)`, as in `Codec.share`."""


def _gathered(parts: Parts, exchange: Exchange) -> Parts:
    """The rows of all workers, one after the other."""
    return tuple(exchange.gather(part).flatten(0, 1) for part in parts)


def _joined(encoded: Sequence[Parts]) -> Parts:
    """Each part of all tiles in one tensor [rows, ...], so that one exchange sends it."""
    if len(encoded) == 1:
        return encoded[0]
    return tuple(
        torch.cat([part.reshape(len(part), -1) for part in same], 1)
        for same in zip(*encoded, strict=True)
    )


def _parted(joined: Parts, encoded: Sequence[Parts]) -> Iterator[Parts]:
    """Tile by tile what `_joined` has made one, of as many rows as there are."""
    if len(encoded) == 1:
        yield joined
        return
    cut = [
        whole.split([part[0].numel() for part in same], 1)
        for whole, same in zip(joined, zip(*encoded, strict=True), strict=True)
    ]
    for pieces, parts in zip(zip(*cut, strict=True), encoded, strict=True):
        # Copied: a row of a tile may begin where none of its type may lie.
        own = [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]
        yield tuple(p.view(len(p), *part.shape[1:]) for p, part in zip(own, parts, strict=True))
