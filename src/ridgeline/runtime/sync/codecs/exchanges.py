"""Codecs of rows of numbers, and the three exchanges that an entry may name (`Compression.exchange`).

    sum      they can be added up: the plan's algorithm makes their mean
    scatter  each worker gets its share of every payload, adds up in single precision, encodes the mean, and
             all gather the shares: what is sent does not grow with the number of workers
    gather   every worker gets all payloads and decodes each

Each returns the mean over the workers, and what of the values this worker has contributed to it.

Source of `scatter`: Wang et al., "ZeRO++", 2023 (quantised gradients by all-to-all).
"""

import abc
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Codec, Exchange
from ridgeline.synchronisation import ExchangeKind, share_elements

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
        found, sent = EXCHANGES[exchange.kind](self, values, exchange)
        mean.copy_(found)
        values.sub_(sent)


def by_sum(codec: RowCodec, values: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """The mean of the encoded payloads, decoded."""
    parts = codec.encode(values[None])
    sent = codec.decode(parts, values.numel())[0]
    # Copied, since what was sent may be a view of the parts.
    means = tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
    for part in means:
        exchange.mean(part.view(-1))
    return codec.decode(means, values.numel())[0], sent


def by_gather(codec: RowCodec, values: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """The mean of all payloads, decoded one by one: at once they would take as many buckets of memory."""
    parts = codec.encode(values[None])
    gathered = tuple(exchange.gather(part).flatten(0, 1) for part in parts)
    total, sent = torch.zeros_like(values), values
    for rank in range(exchange.size):
        row = codec.decode(tuple(part[rank : rank + 1] for part in gathered), values.numel())[0]
        total += row
        sent = row if rank == exchange.rank else sent
    return total.div_(exchange.size), sent


def by_scatter(codec: RowCodec, values: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """The encoded means of equal shares, one a worker; the last share is filled up."""
    share = share_elements(values.numel(), exchange.size, codec.block)
    rows = functional.pad(values, (0, exchange.size * share - values.numel()))
    parts = codec.encode(rows.view(exchange.size, share))
    sent = codec.decode(parts, share)
    mine = codec.decode(tuple(map(exchange.scatter, parts)), share).mean(0)
    told = codec.encode(mine[None])
    heard = tuple(exchange.gather(part).flatten(0, 1) for part in told)
    mean = codec.decode(heard, share)
    # What rounding the mean of its share lost, its owner makes up for: for all workers at once.
    sent[exchange.rank] -= exchange.size * (mine - mean[exchange.rank])
    return mean.view(-1)[: values.numel()], sent.view(-1)[: values.numel()]


EXCHANGES: dict[ExchangeKind, Callable[[RowCodec, Tensor, Exchange], tuple[Tensor, Tensor]]] = {
    "sum": by_sum,
    "scatter": by_scatter,
    "gather": by_gather,
}
"""The exchange of each kind that an entry may name."""
