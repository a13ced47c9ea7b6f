"""Sums by copies between workers that share memory, here threads whose barrier is torch's no more than theirs."""

import threading
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.runtime.sync.transports.copy_engine import Peers, share_elements, sum_by_copies

FACTOR = 0.25


def summed(values: Sequence[Tensor], *, room: int, rounds: int = 1) -> list[Tensor]:
    """What workers hold after so many sums, one after the other over the same shared memory."""
    size, like = len(values), values[0]
    shared = [like.new_full((room,), torch.nan) for _ in range(size)]
    barrier = threading.Barrier(size)
    held = [own.clone() for own in values]

    def work(rank: int) -> None:
        fetched = like.new_empty(size, share_elements(room, like.element_size(), size))
        peers = Peers(rank, shared, fetched, lambda: barrier.wait(60.0) and None)
        for _ in range(rounds):
            sum_by_copies(held[rank], peers, FACTOR)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return held


@given(
    size=st.integers(2, 5),
    num_elements=st.integers(1, 400),
    more=st.integers(0, 50),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    rounds=st.integers(1, 3),
)
def test_all_hold_the_scaled_sum(
    size: int, num_elements: int, more: int, dtype: torch.dtype, rounds: int
) -> None:
    """Of any number of elements, in memory for more of them, again and again; the same bits on all workers."""
    generator = torch.Generator().manual_seed(num_elements)
    # Whole numbers that stay below 2^8 add up exactly in every type, and FACTOR scales them exactly.
    values = [
        torch.randint(-6, 7, (num_elements,), generator=generator).to(dtype) for _ in range(size)
    ]
    want = torch.stack(values).double()
    for _ in range(rounds):
        want = (want * FACTOR).sum(0).expand_as(want)
    found = summed(values, room=num_elements + more, rounds=rounds)
    for own in found:
        assert torch.equal(own, found[0])
        torch.testing.assert_close(
            own.double(), want[0], rtol=rounds * torch.finfo(dtype).eps, atol=0.0
        )


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_shares_are_whole_lines(element_bytes: int, size: int) -> None:
    """All but the last begin and end at one, and together they are no less than the whole."""
    for num_elements in (1, 127, 128, 129, 10_000_019):
        share = share_elements(num_elements, element_bytes, size)
        assert share * element_bytes % 128 == 0
        assert size * share >= num_elements
        assert (share - 128 // element_bytes) * size < num_elements
