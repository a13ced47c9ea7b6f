"""Payloads that are encoded piece by piece, as large ones are on a CPU, arrive as they do at once."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_workers import Channel, Worker
from test_codec_laws import by_codec, gradients
from torch import Tensor

from ridgeline.plan import Sync
from ridgeline.runtime.sync.codecs import tiles, topk

SHAPES = [(20, 30), (7,), (300,)]
elements = st.floats(-4, 4, width=32) | st.sampled_from(
    (0.0, -1.0, 1.0, float("nan"), float("inf"))
)


@by_codec
@pytest.mark.parametrize("workers", [2, 3])
def test_tiles_change_nothing(name: str, options: dict[str, Any], workers: int) -> None:
    """What arrives and what is left out are the same bits, with tiles far smaller than a parameter."""
    channel = Channel(workers)
    sync = Sync(compression=name, options=options, bucket_bytes=(10_000,))

    def work(rank: int) -> list[Tensor]:
        worker = Worker(channel, rank, sync, SHAPES)
        arrived = [t for step in range(3) for t in worker.reduce(gradients(worker, step)).values()]
        return [t.clone() for t in (*arrived, *worker.residuals().values())]

    at_once = channel.run(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ELEMENTS", 64)
        patch.setattr(topk, "TILE_ELEMENTS", 64)
        in_tiles = channel.run(work)
    for found, wanted in zip(in_tiles, at_once, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@settings(max_examples=200)
@given(values=st.lists(elements, min_size=5, max_size=60), share=st.floats(0, 1))
def test_a_sample_lets_the_largest_through(values: list[float], share: float) -> None:
    """As many as are wanted, of the magnitudes that are the largest of all; a NaN is larger than any."""
    row = torch.tensor(values)
    kept = max(1, round(share * len(values)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk, "TILE_ELEMENTS", 4)
        patch.setattr(topk, "_SAMPLE_ELEMENTS", 4)
        found = topk.largest_positions(row, kept)
    assert len(set(found.tolist())) == kept
    wanted = torch.topk(row.abs(), kept).values
    assert torch.equal(
        row[found].abs().sort(descending=True).values.nan_to_num(9e9), wanted.nan_to_num(9e9)
    )
