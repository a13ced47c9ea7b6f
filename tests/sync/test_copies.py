"""Means by copies between workers that share memory: here they are threads."""

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.runtime.sync.transports.copy_engine import (
    Peers,
    average_by_copies,
    share_elements,
)
from ridgeline.runtime.sync.transports.scaling import Scaling


def averaged(values: Sequence[Tensor], rounds: int) -> list[Tensor]:
    """What workers hold after so many means, one after the other over the same memory."""
    size, like = len(values), values[0]
    shared = [own.clone() for own in values]
    barrier = threading.Barrier(size)

    def work(rank: int) -> None:
        length = share_elements(like.numel(), like.element_size(), size)
        room = like.new_full(((size - 1) * length,), torch.nan)
        peers = Peers(rank, shared, room, lambda: barrier.wait(60.0) and None)
        for _ in range(rounds):
            average_by_copies(peers, Scaling.over(size))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return shared


@given(
    size=st.integers(2, 5),
    num_elements=st.integers(1, 400),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    rounds=st.integers(1, 3),
)
def test_all_hold_the_mean(size: int, num_elements: int, dtype: torch.dtype, rounds: int) -> None:
    """Of any number of elements, again and again, the same bits on all workers."""
    generator = torch.Generator().manual_seed(num_elements)
    values = [
        torch.randint(-6, 7, (num_elements,), generator=generator).to(dtype) for _ in range(size)
    ]
    found = averaged(values, rounds)
    for own in found:
        assert torch.equal(own, found[0])
    # Small whole numbers scaled by a power of two add up exactly; division by 3 or 5 of them rounds.
    want = torch.stack(values).double().mean(0)
    bound = rounds * torch.finfo(dtype).eps * (6.0 if size in (3, 5) else 0.0)
    assert float((found[0].double() - want).abs().max()) <= bound


def test_the_sum_stays_in_range() -> None:
    """The mean of the largest numbers is one of them, and no infinity."""
    most = torch.finfo(torch.float32).max
    for own in averaged([torch.full((5,), most) for _ in range(4)], 1):
        assert torch.equal(own, torch.full((5,), most))


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_shares_are_whole_lines(element_bytes: int, size: int) -> None:
    """All but the last begin and end at one, and together they are no less than the whole."""
    for num_elements in (1, 127, 128, 129, 10_000_019):
        share = share_elements(num_elements, element_bytes, size)
        assert share * element_bytes % 128 == 0
        assert size * share >= num_elements
        assert (share - 128 // element_bytes) * size < num_elements
