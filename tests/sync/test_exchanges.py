"""The three exchanges of encoded payloads: what arrives is the mean of what the workers say they have sent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_workers import Channel, Summing
from torch import Tensor

from ridgeline.runtime.sync.codecs import tiles
from ridgeline.runtime.sync.codecs.codec import Exchange
from ridgeline.runtime.sync.codecs.exchanges import EXCHANGES, Parts, RowCodec
from ridgeline.synchronisation import ExchangeKind


class Whole(RowCodec):
    """Whole numbers, decoded where they lie."""

    def encode(self, rows: Tensor) -> Parts:
        return (rows.round(),)

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        return parts[0]


def shared(
    kind: ExchangeKind, values: Tensor, channel: Channel, rank: int, codec: RowCodec
) -> tuple[Tensor, Tensor]:
    def gather(part: Tensor) -> Tensor:
        return torch.stack(channel.all(rank, part.clone()))

    def scatter(rows: Tensor) -> Tensor:
        return torch.stack([given[rank] for given in channel.all(rank, rows.clone())])

    mean = Summing(channel, rank).mean
    exchange = Exchange(kind, mean, gather, scatter, channel.size, rank)
    left, found = values.clone(), torch.full_like(values, torch.nan)
    EXCHANGES[kind](codec, left, found, exchange)
    return found, values - left


@pytest.mark.parametrize("kind", EXCHANGES)
@given(num_elements=st.integers(1, 40), workers=st.integers(1, 4), seed=st.integers(0, 99))
def test_what_arrives_is_the_mean_of_what_was_sent(
    kind: ExchangeKind, num_elements: int, workers: int, seed: int
) -> None:
    """The same for all; values stay as they are, and rounding a share's mean is its owner's to make up for."""
    channel = Channel(workers)
    generator = torch.Generator().manual_seed(seed)
    given = 10 * torch.randn((workers, num_elements), generator=generator)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        values = given[rank].clone()
        mean, sent = shared(kind, values, channel, rank, Whole({}))
        assert torch.equal(values, given[rank])
        return mean, sent

    means, sent = (torch.stack(found) for found in zip(*channel.run(work), strict=True))
    assert torch.equal(means, means[:1].expand_as(means))
    torch.testing.assert_close(sent.mean(0), means[0], rtol=0, atol=1e-5)
    if kind == "scatter":
        assert torch.equal(means, means.round())
        assert (means[0] - given.round().mean(0)).abs().max() <= 0.5 + 1e-5
    else:
        assert torch.equal(sent, given.round())


class InTwoParts(Whole):
    """Whole numbers and what is left, apart; three elements to a block."""

    block = 3

    def encode(self, rows: Tensor) -> Parts:
        return rows.round(), (rows - rows.round()).to(torch.bfloat16)

    def decode(self, parts: Parts, num_elements: int) -> Tensor:
        assert all(part.is_contiguous() and part.shape[1] == num_elements for part in parts)
        return parts[0] + parts[1].float()


@given(num_elements=st.integers(1, 40), workers=st.integers(1, 4), tile=st.integers(1, 9))
def test_tiles_change_nothing(num_elements: int, workers: int, tile: int) -> None:
    """What is encoded piece by piece arrives, and is left out, as if it had been encoded at once."""
    channel = Channel(workers)
    given = 10 * torch.randn((workers, num_elements), generator=torch.Generator().manual_seed(tile))

    def work(rank: int) -> tuple[Tensor, Tensor]:
        return shared("scatter", given[rank], channel, rank, InTwoParts({}))

    whole = channel.run(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", tile)
        assert all(
            torch.equal(a, b)
            for found, before in zip(channel.run(work), whole, strict=True)
            for a, b in zip(found, before, strict=True)
        )
