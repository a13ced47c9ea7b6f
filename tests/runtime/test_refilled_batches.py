"""Loaders that fill one list, object or array of their own again and again: no batch is ahead of the loop."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from simulated_channel import SimulatedChannel
from torch import Tensor

from ridgeline.errors import PlanError
from ridgeline.feeding.batches import FeedStream
from ridgeline.feeding.channel import Channel, HostChannel
from ridgeline.feeding.making import feed
from ridgeline.feeding.own_memory import OwnMemory

NUM_BATCHES = 8
KEPT = [torch.full((1,), float(index)) for index in range(NUM_BATCHES)]
"""So that none lies where another one lay."""


class Graph:
    """A batch as libraries have it."""

    names = ("x",)
    registry: dict[str, int] = {}

    def __init__(self) -> None:
        self.x = torch.zeros(2)


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("x",)

    def __init__(self) -> None:
        self.x = torch.zeros(2)


def refilled(make: Callable[[], Any], fill: Callable[[Any, int], object]) -> Iterator[Any]:
    batch = make()
    for index in range(NUM_BATCHES):
        fill(batch, index)
        yield batch


def put(batch: Any, index: int) -> None:
    batch.x = torch.full((2,), float(index))


def write(batch: Any, index: int) -> None:
    batch.x.fill_(index)


def first(batch: Any) -> float:
    held = batch if isinstance(batch, (Tensor, numpy.ndarray)) else getattr(batch, "x", batch)
    return float(held[0][0] if isinstance(held, list) else held[0])


@pytest.mark.parametrize(
    ("make", "fill"),
    [
        (Graph, put),
        (Graph, write),
        (Slotted, put),
        (lambda: [torch.zeros(1)], lambda batch, i: batch.__setitem__(0, torch.full((1,), i))),
        (lambda: numpy.zeros(2), lambda batch, i: batch.fill(i)),
    ],
)
def test_each_batch_is_as_the_loader_gave_it(make: Any, fill: Any) -> None:
    """As a plain loop over the loader has it."""
    with feed(refilled(make, fill), "cpu") as stream:
        got = []
        for batch in stream:
            torch.zeros(64, 64) @ torch.zeros(64, 64)
            got.append(first(batch))
    assert got == [float(index) for index in range(NUM_BATCHES)]


@pytest.mark.parametrize(
    ("make", "fill"),
    [
        (lambda: [0], lambda batch, i: batch.__setitem__(0, KEPT[i])),
        (lambda: {"x": 0}, lambda batch, i: batch.update(x=KEPT[i])),
        (Graph, lambda batch, i: setattr(batch, "x", KEPT[i])),
    ],
)
def test_containers_that_are_filled_again_later_are_found_out(make: Any, fill: Any) -> None:
    """What the first batches lie in is new each time, and then it is not."""

    def loader() -> Iterator[Any]:
        batch = None
        for index in range(NUM_BATCHES):
            batch = make() if index < NUM_BATCHES // 2 else batch
            fill(batch, index)
            yield batch

    def train(stream: FeedStream) -> None:
        for _ in stream:
            assert stream._engine is not None
            stream._engine.wait_all()

    with (
        feed(loader(), "cpu", 1) as stream,
        pytest.raises(PlanError, match="wrote into one of before"),
    ):
        train(stream)


@pytest.mark.parametrize("make", [Graph, Slotted, lambda: numpy.zeros(2), lambda: [torch.ones(1)]])
def test_batches_made_anew_are_loaded_ahead(make: Callable[[], Any]) -> None:
    """What all objects of a class share is no place of theirs."""
    memory = OwnMemory([], depth=1)
    memory.note([make()])
    assert not memory.is_sure
    memory.note([make()])
    assert memory.is_sure


@pytest.mark.parametrize("make", [Graph, Slotted, lambda: numpy.zeros(2), lambda: [torch.ones(1)]])
def test_one_object_for_all_batches_is_found_out(make: Callable[[], Any]) -> None:
    """Also where the tensors in it are new ones."""
    memory, batch = OwnMemory([], depth=1), make()
    memory.note([batch])
    if hasattr(batch, "x"):
        batch.x = torch.ones(2)
    memory.note([batch])
    assert not memory.is_sure


@pytest.mark.parametrize("make_channel", [lambda: SimulatedChannel(3), HostChannel])
@pytest.mark.parametrize("fill", [put, write])
def test_channels_copy_tensors_and_load_no_object_ahead(
    make_channel: Callable[[], Channel], fill: Callable[[Any, int], object]
) -> None:
    """An object's tensors are moved when it is handed over: what is refilled must not be ahead until then."""
    stream = FeedStream(
        refilled(Graph, fill),
        torch.device("cpu"),
        2,
        make_channel(),
        fixed_addresses=True,
    )
    with stream:
        got = []
        for batch in stream:
            torch.zeros(64, 64) @ torch.zeros(64, 64)
            got.append(first(batch))
    assert got == [float(index) for index in range(NUM_BATCHES)]


def test_what_a_channel_copies_is_ahead_from_the_first_batch_on() -> None:
    """A tensor that is refilled is copied before the loader goes on; numbers and texts have no memory."""
    batch = {"x": torch.zeros(2), "index": 3, "name": "first", "none": None}
    made = 0

    def loader() -> Iterator[Any]:
        nonlocal made
        for made in range(1, NUM_BATCHES + 1):
            batch["x"].fill_(made)
            yield batch

    stream = FeedStream(loader(), torch.device("cpu"), 2, HostChannel(), fixed_addresses=False)
    with stream:
        taken = next(stream)
        stream._engine.wait_all()  # type: ignore[union-attr]
        assert made == 3
        assert taken["x"].tolist() == [1.0, 1.0]
