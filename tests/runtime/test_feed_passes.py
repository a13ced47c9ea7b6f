"""Passes: every loop over a feed is one of its loader, and none is silently empty."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated_channel import SimulatedChannel
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ridgeline.errors import PlanError
from ridgeline.feeding import Handover, feed
from ridgeline.feeding.batches import FeedStream

CPU = torch.device("cpu")


class Loader:
    """Batches of one tensor; notes the threads in which it is read, and how many of its iterators are open."""

    def __init__(self, length: int) -> None:
        self.length, self.begun, self.open = length, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        self.open += 1
        try:
            for index in range(self.length):
                yield torch.full((4,), float(index))
        finally:
            self.open -= 1


class Returning:
    """A loader that is its own iterator, and goes back to its first batch whenever it is iterated."""

    def __init__(self, length: int) -> None:
        self.length, self.begun, self.open, self._index = length, 0, 0, 0

    def __iter__(self) -> "Returning":
        self.begun += 1
        self._index = 0
        return self

    def __next__(self) -> Tensor:
        if self._index == self.length:
            raise StopIteration
        self._index += 1
        return torch.full((4,), float(self._index - 1))


def numbers(batches: Any) -> list[int]:
    return [int(batch[0]) for batch in batches]


@given(
    kind=st.sampled_from([Loader, Returning]),
    length=st.integers(1, 8),
    depth=st.integers(0, 3),
    fixed=st.booleans(),
    taken=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    shares=st.booleans(),
)
def test_every_loop_begins_at_the_first_batch(
    kind: type[Loader | Returning],
    length: int,
    depth: int,
    fixed: bool,
    taken: list[int],
    shares: bool,
) -> None:
    """As over the loader itself, wherever loops before were broken off; one iterator is open at most."""
    before = {*threading.enumerate()}
    loader = kind(length)
    handover = Handover() if shares else None
    batches = feed(loader, "cpu", max(depth, fixed), fixed_addresses=fixed, handover=handover)
    for count in taken:
        got = []
        for batch in batches:
            got.append(int(batch[0]))
            assert loader.open <= 1  # 0 where the thread ahead has come to the end
            if len(got) == count:
                break
        assert got == list(range(min(max(count, 1), length) if count else length))
    assert loader.begun == len(taken)
    assert batches.report().batches == sum(min(n, length) if n else length for n in taken)
    batches.close()
    assert loader.open == 0
    assert {*threading.enumerate()} <= before


def test_a_pass_that_is_over_leaves_no_thread() -> None:
    """Though the feed is kept for the next one."""
    before = {*threading.enumerate()}
    batches = feed(Loader(3), "cpu", 2)
    for _ in range(2):
        assert numbers(batches) == [0, 1, 2]
        assert {*threading.enumerate()} <= before
        with pytest.raises(StopIteration):
            next(batches)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_generator_gives_one_pass_and_says_so(depth: int) -> None:
    """A loop that was broken off is gone on with, so that no batch is lost."""
    batches = feed(iter(Loader(3)), "cpu", depth)
    for batch in batches:
        assert int(batch[0]) == 0
        break
    assert numbers(batches) == [1, 2]
    with pytest.raises(PlanError) as caught:
        list(batches)
    assert str(caught.value) == (
        "wanted another pass over the batches, got generator, which gives one and ended after 3 batches, in "
        "feed(...); pass what can be iterated again, such as a DataLoader or a list, or make a loader and a "
        "feed for every pass"
    )


def test_a_wrapper_of_a_generator_says_so_too() -> None:
    """It begins again, but has nothing left, as a progress bar around a generator; an empty list is empty."""

    class Wrapper:
        def __init__(self, inner: Iterator[Tensor]) -> None:
            self._inner = inner

        def __iter__(self) -> Iterator[Tensor]:
            yield from self._inner

    batches = feed(Wrapper(iter(Loader(2))), "cpu")
    assert numbers(batches) == [0, 1]
    with pytest.raises(
        PlanError, match="got Wrapper, which gives one and ended after 2 batches, in feed"
    ):
        list(batches)
    loader = [torch.zeros(1)]
    batches = feed(loader, "cpu")
    assert len(list(batches)) == 1
    loader.clear()
    assert list(batches) == []
    assert list(feed([], "cpu")) == []


@pytest.mark.parametrize("begun", [False, True])
def test_a_closed_feed_is_not_iterated(begun: bool) -> None:
    """It says so instead of having no batches."""
    with feed(Loader(3), "cpu") as batches:
        if begun:
            next(batches)
    with pytest.raises(PlanError) as caught:
        list(batches)
    assert str(caught.value) == (
        "wanted to iterate over a feed, got one that is closed; iterate inside its with block or before "
        "close(), or make another with feed(...)"
    )


def test_what_next_began_a_loop_goes_on_with() -> None:
    """Once; the loop after it begins anew."""
    batches = feed(Loader(3), "cpu")
    assert int(next(batches)[0]) == 0
    assert numbers(batches) == [1, 2]
    assert numbers(batches) == [0, 1, 2]


def test_an_older_pass_is_refused() -> None:
    """A feed has one pass at a time."""
    batches = feed(Loader(3), "cpu")
    first = iter(batches)
    next(first)
    second = iter(batches)
    with pytest.raises(PlanError) as caught:
        next(first)
    assert str(caught.value) == (
        "wanted the next batch of pass 1, got a feed in pass 2, which has one at a time; iterate a feed of its "
        "own for each loop, or let threads share one iter(feed)"
    )
    assert numbers(second) == [0, 1, 2]


def test_an_error_ends_its_pass_alone() -> None:
    """The next one tries again, as with the loader itself."""

    class Failing(Loader):
        def __iter__(self) -> Iterator[Tensor]:
            yield from super().__iter__()
            if self.begun == 1:
                raise ValueError("damaged sample")

    batches = feed(Failing(2), "cpu")
    with pytest.raises(ValueError, match="damaged sample"):
        list(batches)
    assert numbers(batches) == [0, 1]


@pytest.mark.parametrize("channel", [None, "late"])
def test_fixed_addresses_are_those_of_every_pass(channel: str | None) -> None:
    """A step that was captured with them goes on in the next epoch, also after a loop broken off."""
    late = SimulatedChannel(0) if channel else None
    batches = (
        FeedStream(Loader(7), CPU, 2, late, fixed_addresses=True)
        if late
        else feed(Loader(7), "cpu", 2, fixed_addresses=True)
    )
    seen = []
    for stop in (7, 3, 1, 7):
        addresses = set()
        for index, batch in enumerate(batches, 1):
            addresses.add(batch.data_ptr())
            if index == stop:
                break
        seen.append(addresses)
    assert len(seen[0]) == 2
    assert all(addresses <= seen[0] for addresses in seen)
    batches.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_epochs_of_a_distributed_sampler(workers: int) -> None:
    """`set_epoch` between passes has its effect: nothing of the next pass is taken before it begins."""
    data = list(range(40))
    sampler: DistributedSampler[int] = DistributedSampler(
        data, num_replicas=2, rank=1, shuffle=True
    )  # type: ignore[arg-type]
    loader: DataLoader[int] = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=4,
        sampler=sampler,
        num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )
    batches = feed(loader, "cpu", 2)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        wanted = list(sampler)
        got = []
        for batch in batches:
            got += batch.tolist()
            if epoch == 1:
                break
        assert got == (wanted[:4] if epoch == 1 else wanted)
    batches.close()
    del batch
    gc.collect()
    assert not any(map(is_of_loader, psutil.Process().children(recursive=True)))


def is_of_loader(process: psutil.Process) -> bool:
    """Whether it is a worker of a DataLoader, and has not ended."""
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("has_closer_inside", [False, True])
def test_who_waits_while_another_thread_closes_is_told_the_end(has_closer_inside: bool) -> None:
    """Neither a batch that was given up, nor an error of the engine inside; also where the loader closes."""
    is_asked, is_let = threading.Event(), threading.Event()

    def loaded() -> Iterator[int]:
        yield 0
        is_asked.set()
        is_let.wait()
        if has_closer_inside:
            batches.close()
        yield 1
        yield 2

    batches = feed(loaded(), "cpu", 1)
    got: list[object] = []

    def use() -> None:
        got.extend(batches)

    user = threading.Thread(target=use)
    user.start()
    is_asked.wait()
    if has_closer_inside:
        is_let.set()
    else:
        closer = threading.Thread(target=batches.close)
        closer.start()
        while not batches._is_closed:
            pass
        is_let.set()
        closer.join()
    user.join()
    batches.close()
    assert got == [0]


def test_a_feed_has_as_many_batches_as_its_loader() -> None:
    """Schedules and mean losses ask for it; where a loader cannot tell, a list of the feed does not mind."""
    batches = feed(DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2), "cpu")
    assert len(batches) == 3 == len(list(batches))
    assert feed([], "cpu")
    endless = feed((torch.ones(1) for _ in range(2)), "cpu")
    with pytest.raises(TypeError, match="'generator' has no len"):
        len(endless)
    assert len(list(endless)) == 2
