"""Means by copies between workers that share memory: here they are threads."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.transports import copy_engine
from ridgeline.runtime.sync.transports.copy_engine import (
    CopyEngine,
    CopyPeers,
    average_by_copies,
    share_elements,
)
from ridgeline.runtime.sync.transports.scaling import Scaling
from ridgeline.runtime.sync.transports.shared_memory import SharedMemory


def averaged(values: Sequence[Tensor], rounds: int) -> list[Tensor]:
    """What workers hold after so many means, one after the other over the same memory."""
    size, like = len(values), values[0]
    shared = [own.clone() for own in values]
    barrier = threading.Barrier(size)

    def work(rank: int) -> None:
        length = share_elements(like.numel(), like.element_size(), size)
        room = like.new_full(((size - 1) * length,), torch.nan)
        peers = CopyPeers(rank, shared, room, lambda: barrier.wait(60.0) and None)
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


LEAST_BYTES, LARGE, SMALL = 1024, 300, 100


class Host:
    """Two workers in threads, and the memory that they share."""

    def __init__(self) -> None:
        self.made: list[list[Tensor]] = [[], []]
        self.barrier = threading.Barrier(2)
        self.local = threading.local()
        self.left_to_nccl: list[int] = []

    def share(self, num_elements: int, dtype: torch.dtype, **_: Any) -> SharedMemory:
        """As `shared_memory.share`."""
        mine = self.made[self.local.rank]
        number = len(mine)
        mine.append(torch.zeros(num_elements, dtype=dtype))
        self.barrier.wait(60.0)  # a rendezvous

        def get_buffer(rank: int, shape: tuple[int], dtype: torch.dtype) -> Tensor:
            return self.made[rank][number][: shape[0]]

        wait = lambda: self.barrier.wait(60.0) and None  # noqa: E731 - torch's handle has an attribute
        return SharedMemory(mine[-1], SimpleNamespace(get_buffer=get_buffer, barrier=wait))

    def all_reduce(self, values: Tensor, group: object) -> None:
        """Notes what is left to NCCL."""
        self.left_to_nccl.append(values.numel())

    def run(self, work: Callable[[int], None]) -> None:
        """Do something on both, each in a thread."""

        def begin(rank: int) -> None:
            self.local.rank = rank
            work(rank)

        threads = [threading.Thread(target=begin, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    monkeypatch.setattr(copy_engine, "share", found.share)
    monkeypatch.setattr(copy_engine, "hosts_of", lambda _world: [[0, 1]])
    monkeypatch.setattr(copy_engine, "dist", SimpleNamespace(all_reduce=found.all_reduce))
    return found


def engine_of(rank: int) -> CopyEngine:
    world = SimpleNamespace(
        device=torch.device("cpu"),
        group=lambda _axis: None,
        axis_size=lambda _axis: 2,
        axis_rank=lambda _axis: rank,
    )
    return CopyEngine(cast("Any", world), {"least_bytes": LEAST_BYTES})


def test_large_buckets_are_shared_and_small_ones_left_to_nccl(host: Host) -> None:
    """Also after they are cut anew; what the first ones lay in is let go."""
    means: dict[int, list[Tensor]] = {0: [], 1: []}
    kept: dict[int, int] = {}

    def work(rank: int) -> None:
        engine = engine_of(rank)
        for sizes in ((SMALL, LARGE), (LARGE, LARGE, SMALL)):
            buckets = tuple(
                Bucket(n, [(f"p{n}", nn.Parameter(torch.zeros(size)))], allocate=engine.allocate)
                for n, size in enumerate(sizes)
            )
            engine.arranged(buckets)
            for number, bucket in enumerate(buckets):
                bucket.payload.fill_(float(4 * number + 2 * rank))
                engine.reduce(bucket)
            means[rank] = [bucket.payload.clone() for bucket in buckets]
        kept[rank] = len(engine._memories)
        engine.close()

    host.run(work)
    assert kept == {0: 2, 1: 2}
    assert [len(made) for made in host.made] == [3, 3]
    assert [size // SMALL for size in sorted(host.left_to_nccl)] == [1, 1, 1, 1]
    for one, other in zip(means[0][:2], means[1][:2], strict=True):
        assert torch.equal(one, other)
    assert [float(mean.unique()) for mean in means[0][:2]] == [1.0, 5.0]
