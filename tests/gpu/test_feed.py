"""Feeding and results on a GPU: whole batches, no hidden synchronisation, copies that overlap."""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from quiet_device import holds_when_quiet, in_turns
from torch import Tensor

from ridgeline.feeding import feed, to_host
from ridgeline.feeding.batches import FeedStream
from ridgeline.feeding.channel import CudaChannel
from ridgeline.feeding.results import ToHost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LATE = 2_000_000
"""Cycles of `torch.cuda._sleep`: about a millisecond, much longer than the host needs for a step."""


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class PoisoningChannel(CudaChannel):
    """Spoils every target as soon as it may be written: whoever still needs the old batch sees it."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Any]) -> tuple[Any, Any]:
        with torch.cuda.stream(self._stream):
            for moment in after:
                self._stream.wait_event(moment)
            for target, _ in pairs:
                if target.is_cuda:
                    target.fill_(float("nan"))
            torch.cuda._sleep(LATE // 4)
        return super().copy(pairs, after)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_late_streams_never_show_a_wrong_batch(depth: int, fixed: bool) -> None:
    """The consumer computes long after the host has gone on; slots are poisoned when they are free."""
    loader = [{"x": torch.full((1 << 16,), float(i)), "i": i} for i in range(24)]
    loader.append({"x": torch.full((1000,), 24.0), "i": 24})
    channel = PoisoningChannel(device(), inward=True)
    sums: list[Tensor] = []
    for batch in FeedStream(loader, device(), depth, channel, fixed_addresses=fixed):
        torch.cuda._sleep(LATE)
        sums.append(torch.stack((batch["x"].min(), batch["x"].max())))
    assert torch.stack(sums).tolist() == [[float(i)] * 2 for i in range(25)]


def test_batches_that_are_held_stay_as_they_are() -> None:
    """Also when the feed is over and its memory has been asked for again."""
    loader = [torch.full((1 << 18,), float(i)) for i in range(12)]
    batches = FeedStream(loader, device(), 2, PoisoningChannel(device(), inward=True))
    held = list(batches)
    assert batches.report().given_away == 11
    del batches
    gc.collect()
    spoiled = [torch.full((1 << 18,), float("nan"), device="cuda") for _ in range(12)]
    assert [float(batch.mean()) for batch in held] == [float(i) for i in range(12)]
    assert all(bool(s.isnan().all()) for s in spoiled)


def test_a_dropped_batch_whose_kernels_are_late_is_not_overwritten_by_others() -> None:
    """Given-away and last buffers go back to the allocator only when the consumer's stream is through."""
    result: list[Tensor] = []
    for _ in range(3):
        held = []
        for index, batch in enumerate(feed([torch.ones(1 << 20)] * 6, "cuda")):
            torch.cuda._sleep(LATE)
            result.append(batch.sum())
            held.append(batch)
            if index % 2:
                held.clear()
        del batch, held
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.full((1 << 20,), float("nan"), device="cuda")
    assert all(float(r) == float(1 << 20) for r in result)


class Refilling:
    """A loader whose batches are one pinned buffer, filled again."""

    def __iter__(self) -> Iterator[Tensor]:
        pinned = torch.empty(1 << 22, pin_memory=True)
        for index in range(12):
            yield pinned.fill_(float(index))


def test_a_loader_that_fills_its_pinned_memory_again_spoils_no_batch() -> None:
    """Copies are late, since they wait for the poison; the loader is asked when its memory has been read."""
    sums: list[Tensor] = []
    for batch in FeedStream(Refilling(), device(), 4, PoisoningChannel(device(), inward=True)):
        torch.cuda._sleep(LATE)
        sums.append(torch.stack((batch.min(), batch.max())))
    assert torch.stack(sums).tolist() == [[float(i)] * 2 for i in range(12)]


def test_any_nest_arrives() -> None:
    """Several dtypes, strides, empty tensors, numbers without dimensions, other leaves."""
    images = torch.rand(4, 3, 8, 8).to(memory_format=torch.channels_last)
    batch = {
        "images": images,
        "labels": [torch.arange(4), torch.tensor(3.5, dtype=torch.float64)],
        "empty": torch.empty(0, 5),
        "sparse": torch.eye(3).to_sparse(),
        "there": torch.ones(2, device="cuda"),
        "name": "batch",
    }
    (got,) = feed([batch], "cuda")
    assert torch.equal(got["images"].cpu(), images)
    assert got["images"].stride() == images.stride()
    assert got["labels"][0].tolist() == [0, 1, 2, 3]
    assert float(got["labels"][1]) == 3.5
    assert got["empty"].shape == (0, 5)
    assert torch.equal(got["sparse"].to_dense().cpu(), torch.eye(3))
    assert got["there"].tolist() == [1.0, 1.0]
    assert got["name"] == "batch"


def test_fixed_addresses_serve_a_graph_for_each() -> None:
    """A step captured per address replays on every later batch without a copy."""
    graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
    got: list[Tensor] = []
    loader = [torch.full((1 << 14,), float(i)) for i in range(20)]
    for batch in feed(loader, "cuda", 2, fixed_addresses=True):
        if batch.data_ptr() not in graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                mean = batch.mean()
            graphs[batch.data_ptr()] = graph, mean
        graph, mean = graphs[batch.data_ptr()]
        graph.replay()
        got.append(mean.clone())
    assert len(graphs) == 2
    assert torch.stack(got).tolist() == [float(i) for i in range(20)]


def test_the_steady_state_has_no_hidden_synchronisation() -> None:
    """Neither a feed nor a stream of results makes the host wait inside torch."""
    loader = [torch.full((1 << 16,), float(i)) for i in range(30)]
    batches = feed(loader, "cuda")
    results = to_host(batch * 2 for batch in batches)
    seen = []
    try:
        for index, result in enumerate(results):
            if index == 6:
                torch.cuda.set_sync_debug_mode("error")
            seen.append(result[0].item())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen == [2.0 * i for i in range(30)]


def test_pinned_batches_of_a_data_loader_are_used_as_they_are() -> None:
    """No second copy on the host."""
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(64.0)), batch_size=8, pin_memory=True
    )
    batches = feed(loader, "cuda")
    got = torch.cat([batch[0] for batch in batches])
    assert got.tolist() == list(range(64))
    assert all(not slot.hosts for slot in batches._slots)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_results_come_back_whole_and_in_order(depth: int) -> None:
    """Also late ones, and those that are kept."""

    def results() -> Iterator[dict[str, Any]]:
        for index in range(20):
            torch.cuda._sleep(LATE)
            yield {"r": torch.full((1 << 16,), float(index), device="cuda"), "i": index}

    kept = []
    for got in to_host(results(), depth):
        assert not got["r"].is_cuda
        assert got["r"].is_pinned()
        assert bool((got["r"] == got["i"]).all())
        if got["i"] % 3 == 0:
            kept.append(got)
    assert all(bool((k["r"] == k["i"]).all()) for k in kept)


@pytest.mark.quiet
def test_computation_hides_the_copies_of_results() -> None:
    """The seeds' experiment, shorter: little more than the longer of computing and copying."""
    x = torch.rand(4000, 4000, device="cuda")
    pinned = torch.empty(4000, 4000, pin_memory=True)
    reports = []

    def ours() -> None:
        stream = ToHost((x.mm(x) for _ in range(20)), 2)
        for result in stream:
            float(result[0, 0])
        reports.append(stream.report())

    def wrong() -> str:
        found = in_turns(
            {
                "compute": lambda: [x.mm(x) for _ in range(20)],
                "copy": lambda: [pinned.copy_(x, non_blocking=True) for _ in range(20)],
                "ours": ours,
            }
        )
        hidden = reports[-1].hidden
        # The last copy has nothing left to hide behind: one in twenty.
        good = found["ours"] < 1.15 * max(found["compute"], found["copy"])
        return "" if good and hidden is not None and hidden > 0.8 else f"{found}, hidden {hidden}"

    holds_when_quiet(wrong)
    assert reports[-1].num_bytes == 20 * 4000 * 4000 * 4


@pytest.mark.quiet
def test_the_report_of_a_feed_reads_the_gpus_clock() -> None:
    """Copies behind a longer computation are hidden; the rate is one that a link can have."""
    loader = [torch.rand(1 << 22) for _ in range(30)]

    def wrong() -> str:
        batches = feed(loader, "cuda")
        for _ in batches:
            torch.cuda._sleep(20 * LATE)
        report = batches.report()
        assert report.hidden is not None
        assert report.bytes_per_s is not None
        good = report.hidden > 0.8 and report.bound == "compute"
        return "" if good and 1e9 < report.bytes_per_s < 2e12 else repr(report)

    holds_when_quiet(wrong)


def test_nothing_is_left_on_the_gpu() -> None:
    """Memory goes back when a feed is exhausted, broken off, or fails."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    list(feed([torch.rand(1 << 20)] * 5, "cuda"))
    for _ in feed([torch.rand(1 << 20)] * 5, "cuda"):
        break
    for _ in to_host(torch.rand(1 << 20, device="cuda") for _ in range(5)):
        break

    def failing() -> Iterator[Tensor]:
        yield torch.rand(1 << 20)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(feed(failing(), "cuda"))
    del _
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
