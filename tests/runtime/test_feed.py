"""Feeding: the loader's batches, in order, errors where they happen, nothing left running."""

import gc
import itertools
import os
import threading
import weakref
from collections import namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ridgeline.engine import Engine, Variable
from ridgeline.errors import PlanError
from ridgeline.feeding import batches as asking
from ridgeline.feeding import feed
from ridgeline.feeding import source as loading

Pair = namedtuple("Pair", "x y")  # noqa: PYI024 - a plain namedtuple, as collate functions make them


@given(st.integers(0, 20), st.integers(0, 5), st.booleans())
def test_order_and_content_are_those_of_the_loader(length: int, depth: int, fixed: bool) -> None:
    """Whatever the depth, the batches come once each and in order."""
    loader = [{"x": torch.full((2,), i)} for i in range(length)]
    batches = feed(loader, "cpu", max(depth, fixed), fixed_addresses=fixed)
    assert [int(batch["x"][0]) for batch in batches] == list(range(length))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_loaders_error_comes_unchanged_at_its_batch(depth: int) -> None:
    """Two good batches first, then the original exception, then nothing."""
    error = ValueError("damaged sample")

    def loader() -> Iterator[int]:
        yield 1
        yield 2
        raise error

    batches = feed(loader(), "cpu", depth)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(ValueError, match="damaged sample") as raised:
        next(batches)
    assert raised.value is error
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_loader_that_cannot_begin_raises_at_the_first_batch(depth: int) -> None:
    """In every pass: none of them is silently empty."""

    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no data set")

    batches = feed(Broken(), "cpu", depth)
    with pytest.raises(OSError, match="no data set"):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)
    with pytest.raises(OSError, match="no data set"):
        list(batches)


@pytest.mark.parametrize("depth", [0, 2])
def test_an_exhausted_feed_stays_exhausted(depth: int) -> None:
    """Its loader is not asked again, even one that would begin anew."""
    asked: list[int] = []

    class Loader:
        def __iter__(self) -> "Loader":
            return self

        def __next__(self) -> int:
            asked.append(1)
            if len(asked) == 3:
                raise StopIteration
            return len(asked)

    batches = feed(Loader(), "cpu", depth)
    assert list(batches) == [1, 2]
    with pytest.raises(StopIteration):
        next(batches)
    with pytest.raises(PlanError, match="wanted another pass over the batches, got Loader, which"):
        iter(batches)
    assert len(asked) == 3


def test_breaking_off_ends_the_thread() -> None:
    """Closing, leaving a with block or dropping the feed leaves no thread, and closes the loader."""
    before = {*threading.enumerate()}
    closed: list[str] = []

    class Loader:
        def __init__(self, name: str) -> None:
            self.name = name

        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(1000)
            finally:
                closed.append(self.name)

    batches = feed(Loader("closed"), "cpu", 3)
    assert next(batches) == 0
    batches.close()
    batches.close()
    with feed(Loader("left"), "cpu", 3) as batches:
        next(batches)
    for _ in feed(Loader("dropped"), "cpu", 3):
        break
    next(iter(feed(Loader("caller's thread"), "cpu", 0)))
    assert {*threading.enumerate()} <= before
    assert closed == ["closed", "left", "dropped", "caller's thread"]


def test_a_feed_in_a_reference_cycle_ends_whoever_collects_it() -> None:
    """Even its own loading thread, which cannot wait for itself."""
    before = {*threading.enumerate()}
    collected, may_collect = threading.Event(), threading.Event()

    def loader() -> Iterator[int]:
        yield from (0, 1)
        may_collect.wait(30)
        gc.collect()
        collected.set()
        yield 2

    holder: list[Any] = [feed(loader(), "cpu", 2)]
    holder.append(holder)
    assert [next(holder[0]) for _ in range(2)] == [0, 1]
    gc.disable()
    try:
        del holder
        may_collect.set()
        assert collected.wait(30)
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name.startswith("ridgeline"):
            thread.join(30)
    assert {*threading.enumerate()} <= before


def test_it_runs_ahead_by_depth_and_no_further() -> None:
    """When the consumer holds batch 1, at most depth further batches were taken."""
    taken: list[int] = []
    gate = threading.Event()

    def loader() -> Iterator[int]:
        for index in range(10):
            taken.append(index)
            if index == 4:
                gate.set()
            yield index

    batches = feed(loader(), "cpu", 3)
    next(batches)
    next(batches)
    assert gate.wait(30)
    batches.close()
    assert taken[-1] <= 4


def test_any_nest_passes_with_other_leaves_as_they_are() -> None:
    """Dicts, lists, tuples and named tuples keep their types; what is no tensor is the same object."""
    other = object()
    batch = {"a": [torch.arange(3), (other, None)], "b": Pair(torch.ones(2, 2).bool(), "text")}
    for fixed in (False, True):
        (got,) = feed([batch], "cpu", fixed_addresses=fixed)
        assert got["a"][0].tolist() == [0, 1, 2]
        assert got["a"][1] == (other, None)
        assert isinstance(got["b"], Pair)
        assert got["b"].x.all()
        assert got["b"].y == "text"


def test_on_the_cpu_batches_are_those_of_the_loader() -> None:
    """Nothing is copied that need not be."""
    loader = [torch.zeros(3), torch.ones(3)]
    assert all(got is own for got, own in zip(feed(loader, "cpu"), loader, strict=True))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_fixed_addresses_are_at_most_depth(depth: int) -> None:
    """Smaller batches are views of the same memory; strides are kept."""
    sizes = [8, 8, 3, 8, 5, 8, 8, 1]
    loader = [torch.full((n, 2, 3, 3), float(i)) for i, n in enumerate(sizes)]
    loader[3] = loader[3].to(memory_format=torch.channels_last)
    addresses, strides = set(), []
    for index, batch in enumerate(feed(loader, "cpu", depth, fixed_addresses=True)):
        assert torch.equal(batch, loader[index])
        addresses.add(batch.data_ptr())
        strides.append(batch.stride())
    assert len(addresses) == depth
    assert strides == [batch.stride() for batch in loader]


def test_nothing_refers_to_a_batch_that_the_consumer_dropped() -> None:
    """Neither in the loop nor after the end or an error."""
    alive: list[weakref.ref[torch.Tensor]] = []

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(4):
            batch = torch.zeros(3)
            alive.append(weakref.ref(batch))
            yield batch
            del batch
        raise ValueError("over")

    gc.disable()
    try:
        batches = feed(loader(), "cpu", 1)
        next(batches)
        next(batches)  # by now the loader itself has gone on
        assert alive[0]() is None
        with pytest.raises(ValueError, match="over"):
            list(batches)
        del batches
    finally:
        gc.enable()
    assert [ref() for ref in alive] == [None] * 4


def test_a_worker_that_dies_is_told_as_torch_does() -> None:
    """A RuntimeError instead of a hang."""
    loader = DataLoader(
        [torch.zeros(1)] * 4,  # type: ignore[arg-type]
        num_workers=1,
        worker_init_fn=os._exit,
        multiprocessing_context="forkserver",
    )
    with (
        pytest.raises(RuntimeError, match="exited unexpectedly"),
        feed(loader, "cpu", 2) as batches,
    ):
        list(batches)


class Clock:
    """Goes on by what loaders and consumers say that they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        fake = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr(asking, "time", fake)
        monkeypatch.setattr(loading, "time", fake)
        self.may_load, self.has_loaded = threading.Semaphore(0), threading.Semaphore(0)

    def loader(self) -> Iterator[int]:
        """20 batches, each of which takes 10 ms once it may be loaded; so does the end."""
        for index in range(21):
            self.may_load.acquire()
            self.now_s += 0.01
            if index:  # nobody computes before the first one
                self.has_loaded.release()
            if index < 20:
                yield index


def test_the_report_says_what_was_hidden_and_what_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loader does while the consumer computes is hidden; alone it is not."""
    clock = Clock(monkeypatch)
    clock.may_load.release()
    with feed(clock.loader(), "cpu", 2) as fed:
        for _ in fed:
            clock.may_load.release()
            clock.has_loaded.acquire()
            clock.now_s += 0.05
        report = fed.report()
    assert report.hidden is not None
    assert report.hidden > 0.9  # all but the first
    assert report.bound == "compute"
    assert (report.batches, report.num_bytes, report.bytes_per_s) == (20, 0, None)
    assert repr(report).startswith("feed on cpu: 20 batches, hid ")
    wait = Engine.wait

    def wait_for_loader(engine: Engine, variable: Variable) -> None:
        clock.may_load.release()
        wait(engine, variable)

    clock = Clock(monkeypatch)
    monkeypatch.setattr(Engine, "wait", wait_for_loader)
    fed = feed(clock.loader(), "cpu", 2)
    list(fed)
    report = fed.report()
    assert report.hidden == pytest.approx(0.0)
    assert report.bound == "loader"
    assert feed([], "cpu").report().hidden is None


def test_what_cannot_be_fed_is_refused() -> None:
    """Checked at the call, before anything is loaded."""
    with pytest.raises(
        PlanError, match=r"wanted a whole depth >= 0, got -1 in feed\(\.\.\.\); 2 serves"
    ):
        feed([], "cpu", -1)
    with pytest.raises(PlanError, match=r"wanted a whole depth >= 0, got 1\.5 in feed"):
        feed([], "cpu", 1.5)  # type: ignore[arg-type]
    with pytest.raises(
        PlanError, match="wanted a whole depth >= 1 with fixed_addresses=True, got 0 in feed"
    ):
        feed([], "cpu", 0, fixed_addresses=True)
    with pytest.raises(PlanError, match="wanted a CPU or CUDA device, got meta in feed"):
        feed([], "meta")
    with pytest.raises(
        PlanError, match=r"wanted a CPU or CUDA device, got 'nonsense' in feed.*; name it 'cpu'"
    ):
        feed([], "nonsense")
    with pytest.raises(PlanError, match="wanted an iterable of batches, got int in feed"):
        feed(5, "cpu")  # type: ignore[arg-type]


def test_a_device_that_is_not_there_is_refused() -> None:
    """Said by us, and not by an assertion inside torch."""
    with pytest.raises(
        PlanError, match=r"wanted a CUDA device that torch can use for feed\(\.\.\.\), got cuda"
    ):
        feed([], "cuda")


def test_threads_that_share_a_pass_share_its_batches() -> None:
    """Every batch goes to one of them, and each gets its own in order."""
    batches = iter(feed(range(400), "cpu", 3))
    taken: list[list[int]] = [[] for _ in range(4)]
    together = threading.Barrier(4)

    def take(mine: list[int]) -> None:
        together.wait()
        mine.extend(batches)

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(itertools.chain(*taken)) == list(range(400))
    assert all(mine == sorted(mine) for mine in taken)
