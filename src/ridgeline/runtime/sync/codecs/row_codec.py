"""Codecs that encode rows of numbers and decode them again; their exchange is one that an entry may name."""

import abc

from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.codec import Codec, Exchange
from ridgeline.runtime.sync.codecs.exchanges import EXCHANGES, Parts


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
