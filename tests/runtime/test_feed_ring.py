"""The ring under adverse timing: streams that run late never show a wrong batch."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_channel import SimulatedChannel, SimulatedMoment
from torch import Tensor
from torch.utils.data import DataLoader

from ridgeline.feeding.batches import FeedStream
from ridgeline.feeding.results import ToHost

CPU = torch.device("cpu")


def batches_of(length: int, rng: random.Random) -> list[dict[str, Any]]:
    """Batches of uneven size, in one or two leaves."""
    made: list[dict[str, Any]] = []
    for index in range(length):
        size = rng.choice((4, 4, 4, 2, 6))
        batch: dict[str, Any] = {"x": torch.full((size, 2), float(index)), "index": index}
        if rng.random() < 0.7:
            batch["y"] = torch.full((size,), index)
        made.append(batch)
    return made


@settings(max_examples=150)
@given(st.integers(0, 12), st.integers(0, 4), st.booleans(), st.integers(0, 2**32 - 1))
def test_the_consumers_stream_sees_every_batch_whole(
    length: int, depth: int, fixed: bool, seed: int
) -> None:
    """However late it computes, and with buffers used again: no copy comes too early or too late."""
    rng = random.Random(seed)
    loader = batches_of(length, rng)
    channel = SimulatedChannel(seed)
    seen: list[tuple[int, str, bool]] = []
    held: list[tuple[int, Tensor]] = []
    batches = FeedStream(loader, CPU, max(depth, fixed), channel, fixed_addresses=fixed)
    for index, batch in enumerate(batches):
        assert batch["index"] == index
        for key in batch.keys() - {"index"}:

            def look(key: str = key, index: int = index, values: Tensor = batch[key]) -> None:
                same = values.shape == loader[index][key].shape and bool((values == index).all())
                seen.append((index, key, same))

            channel.compute(look)
            if not fixed and rng.random() < 0.3:
                held.append((index, batch[key]))
            del look
    channel.drain()
    assert sorted(seen) == sorted(
        (i, key, True) for i, batch in enumerate(loader) for key in batch if key != "index"
    )
    assert all(bool((values == index).all()) for index, values in held)


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_passes_that_are_broken_off_spoil_no_batch(
    stops: list[int], depth: int, fixed: bool, seed: int
) -> None:
    """What the consumer has yet to compute with is whole, though a new pass has begun with its buffers."""
    channel = SimulatedChannel(seed)
    loader = [torch.full((3,), float(i)) for i in range(6)]
    batches = FeedStream(loader, CPU, depth, channel, fixed_addresses=fixed)
    sums: list[float] = []
    for stop in stops:
        for index, batch in enumerate(batches, 1):
            channel.compute(lambda values=batch: sums.append(float(values.sum())))
            if index == stop:
                break
    channel.drain()
    assert sums == [3.0 * i for stop in stops for i in range(min(stop, 6))]
    batches.close()


@settings(max_examples=100)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_work_on_a_batch_kept_into_the_next_round_is_waited_for(
    length: int, depth: int, seed: int
) -> None:
    """A consumer that also uses the previous batch, as momentum or sequence models do."""
    channel = SimulatedChannel(seed)
    loader = [torch.full((3,), float(i)) for i in range(length)]
    sums: list[float] = []
    previous: Tensor | None = None
    for batch in FeedStream(loader, CPU, depth, channel):
        both = (batch, batch if previous is None else previous)
        channel.compute(lambda both=both: sums.append(float(both[0].sum() + both[1].sum())))
        previous = batch
        del both
    channel.drain()
    assert sums == [3.0 * (i + max(0, i - 1)) for i in range(length)]


class Pinned(SimulatedChannel):
    """Copies from where the loader's batches lie, as from pinned memory."""

    def needs_staging(self, leaf: Tensor) -> bool:
        return False


class Refilling:
    """A loader with some buffers of its own, which it fills in turn."""

    def __init__(self, length: int, num_buffers: int) -> None:
        self._length = length
        self._buffers = [torch.zeros(3) for _ in range(num_buffers)]

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self._length):
            yield self._buffers[index % len(self._buffers)].fill_(float(index))


@settings(max_examples=100)
@given(st.integers(1, 12), st.integers(1, 3), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_a_loader_that_fills_its_own_pinned_memory_again_spoils_no_batch(
    length: int, num_buffers: int, depth: int, seed: int
) -> None:
    """It is asked for the next batch when the last one has been read, however late that is."""
    channel = Pinned(seed)
    sums: list[float] = []
    for batch in FeedStream(Refilling(length, num_buffers), CPU, depth, channel):
        channel.compute(lambda values=batch: sums.append(float(values.sum())))
    channel.drain()
    assert sums == [3.0 * i for i in range(length)]


def test_a_loader_that_makes_its_batches_anew_waits_for_no_copy() -> None:
    """As torch's own does by default: loading goes on while what it made is read."""
    waited: list[object] = []

    class Watched(Pinned):
        def wait(self, moment: SimulatedMoment) -> None:
            waited.append(moment)
            super().wait(moment)

    for loader, num_waits in (DataLoader(range(4)), 0), (Refilling(4, 1), 4):  # type: ignore[arg-type]
        waited.clear()
        assert len(list(FeedStream(loader, CPU, 6, Watched(0)))) == 4
        assert len(waited) == num_waits


def test_held_buffers_are_given_away_and_counted() -> None:
    """Who keeps all batches gets all of them, and the report says so; who keeps none costs nothing."""
    loader = [torch.full((3,), float(i)) for i in range(10)]
    channel = SimulatedChannel(0)
    batches = FeedStream(loader, CPU, 2, channel)
    kept = list(batches)
    channel.drain()
    assert [int(batch[0]) for batch in kept] == list(range(10))
    # Every batch but the last is still held when its slot's turn comes; the loader's end is met before.
    assert batches.report().given_away == 9
    assert "9 buffers given away" in repr(batches.report())
    assert batches.report().num_bytes == 10 * 12
    channel = SimulatedChannel(0)
    batches = FeedStream(loader, CPU, 2, channel)
    for batch in batches:  # which refers to its last batch while it asks for the next one
        channel.drain()
        assert batch.numel() == 3
    assert batches.report().given_away == 0


@pytest.mark.parametrize("length", [1, 3, 400])
def test_the_report_reads_the_streams(length: int) -> None:
    """Copies during computation count as hidden; windows neither lose nor repeat a batch."""
    channel = SimulatedChannel(5)
    batches = FeedStream([torch.zeros(8)] * length, torch.device("cuda:0"), 2, channel)
    for _ in batches:
        channel.drain()
        for _ in range(3):
            channel.compute(lambda: None)
    report = batches.report()
    assert report.batches == length
    assert report.num_bytes == length * 32
    assert report.copy_s == sum(end.tick - begin.tick for begin, end in channel.copies[:length])
    assert report.hidden is not None
    assert 0 <= report.hidden <= 1
    assert "copied at" in repr(report)


def test_the_ring_has_as_many_addresses_as_said() -> None:
    """`depth + 2` if nothing is held, `depth` with fixed addresses."""
    for fixed, wanted in ((False, 5), (True, 3)):
        channel = SimulatedChannel(1)
        for _ in FeedStream([torch.zeros(4)] * 20, CPU, 3, channel, fixed_addresses=fixed):
            channel.drain()
        assert len(channel.addresses) == wanted


def test_memory_left_behind_is_guarded_for_the_consumers_stream() -> None:
    """A buffer that must grow, and all of them at the end: the allocator is told who uses them."""
    channel = SimulatedChannel(2)
    list(FeedStream([torch.zeros(n) for n in (2, 2, 2, 9)], CPU, 1, channel, fixed_addresses=True))
    channel.drain()
    assert [memory.numel() for memory in channel.given] == [2, 9]


@pytest.mark.parametrize("depth", [0, 1])
def test_dropping_a_feed_guards_its_memory_too(depth: int) -> None:
    """A loop that breaks off leaves kernels behind that still read."""
    channel = SimulatedChannel(2)
    for _ in FeedStream([torch.zeros(2)] * 5, CPU, depth, channel):
        break
    assert len(channel.given) >= 1


def test_a_backward_pass_over_an_overwritten_batch_is_refused() -> None:
    """With fixed addresses autograd notices that its input is gone."""
    weight = torch.ones(3, requires_grad=True)
    losses = []
    channel = SimulatedChannel(3)
    for batch in FeedStream([torch.ones(3)] * 3, CPU, 1, channel, fixed_addresses=True):
        losses.append((weight * batch).sum())
        channel.drain()
    try:
        losses[0].backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        raise AssertionError("wanted a refusal")


@settings(max_examples=150)
@given(st.integers(0, 12), st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_results_come_to_the_host_whole_and_in_order(length: int, depth: int, seed: int) -> None:
    """However late they are computed, whether they are kept or not."""
    rng = random.Random(seed)
    channel = SimulatedChannel(seed)
    asked: list[int] = []

    def results() -> Any:
        for index in range(length):
            asked.append(index)
            result = torch.zeros(rng.choice((4, 3, 7)))
            channel.compute(lambda r=result, i=index: r.fill_(i))
            yield {"r": result, "i": index}

    kept: list[tuple[int, Tensor]] = []
    stream = ToHost(results(), depth, channel)
    count = 0
    for index, got in enumerate(stream):
        assert got["i"] == index
        assert (got["r"] == index).all()
        assert len(asked) == min(length, index + depth + 1)
        if rng.random() < 0.4:
            kept.append((index, got["r"]))
        count += 1
    assert count == length
    channel.drain()
    assert all(bool((values == index).all()) for index, values in kept)
