"""Loaders that do what none should: the loop sees what a plain one would, or an error that says so."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ridgeline.errors import PlanError
from ridgeline.feeding import feed, to_host
from ridgeline.feeding.batches import FeedStream


class FalsyError(Exception):
    def __bool__(self) -> bool:
        return False


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_that_counts_as_false_ends_no_pass_silently(depth: int) -> None:
    """A class may say so; what comes after it would be missing from every epoch."""

    def loader() -> Iterator[Tensor]:
        yield torch.zeros(1)
        raise FalsyError("broken")

    batches = feed(loader(), "cpu", depth)
    next(batches)
    with pytest.raises(FalsyError, match=r"^broken$"):
        next(batches)


def in_one_tensor(length: int) -> Iterator[Tensor]:
    memory = torch.zeros(2)
    for number in range(length):
        yield memory.fill_(number)


def in_one_array(length: int) -> Iterator[Tensor]:
    memory = np.zeros(2)
    for number in range(length):
        memory[:] = number
        yield torch.from_numpy(memory)


def in_views(length: int) -> Iterator[Any]:
    memory = torch.zeros(2, 2)
    for number in range(length):
        yield {"x": memory.fill_(number)[0], "y": torch.zeros(1)}


def in_two_tensors(length: int) -> Iterator[Tensor]:
    places = torch.zeros(2, 1)
    for number in range(length):
        yield places[number % 2].fill_(number)


def in_three_arrays(length: int) -> Iterator[Tensor]:
    places = np.zeros((3, 1))
    for number in range(length):
        places[number % 3] = number
        yield torch.from_numpy(places[number % 3])


class OneTensorLoader(DataLoader):
    def __iter__(self) -> Any:
        memory = torch.zeros(1)
        for (batch,) in super().__iter__():
            yield memory.copy_(batch)


def in_a_derived_loader(length: int) -> Any:
    return OneTensorLoader(TensorDataset(torch.arange(float(length))))


LOADERS = [
    *(
        pytest.param(loader, depth)
        for loader in (in_one_tensor, in_one_array, in_views)
        for depth in (0, 1, 3)
    ),
    pytest.param(in_two_tensors, 2),
    pytest.param(in_three_arrays, 4),
    pytest.param(in_a_derived_loader, 2),
]


@pytest.mark.parametrize(("loader", "depth"), LOADERS)
def test_a_loader_that_fills_the_same_memory_again_feeds_what_a_plain_loop_gets(
    loader: Any, depth: int
) -> None:
    """Nothing is loaded ahead: neither before the loop asks for it, nor while it works with a batch."""
    batches, seen = feed(loader(8), "cpu", depth), []
    for batch in batches:
        values = batch["x"] if isinstance(batch, dict) else batch
        before = values.clone()
        # Were a batch asked of the loader meanwhile, it would have been given by now.
        source = batches._source
        assert source.own_memory.is_sure is False
        assert not batches._ahead
        assert torch.equal(values, before)
        seen.append(int(values[0]))
    assert seen == list(range(8))


@pytest.mark.parametrize("depth", [1, 2])
def test_places_that_are_filled_in_turn_are_loaded_ahead_where_that_overwrites_nothing(
    depth: int,
) -> None:
    """With three places the third batch is loaded while the loop works with the first."""
    batches = feed(in_three_arrays(9), "cpu", depth)
    assert [int(batch) for batch in batches] == list(range(9))
    assert batches._source.own_memory.is_sure


def test_a_data_loader_is_loaded_ahead_from_the_first_batch_on() -> None:
    """It makes each batch anew, unless it collates by a function of the user's."""
    data = TensorDataset(torch.arange(8.0))
    assert feed(DataLoader(data), "cpu")._source.own_memory.is_sure
    own = DataLoader(data, collate_fn=lambda samples: samples)
    assert not feed(own, "cpu")._source.own_memory.is_sure


@pytest.mark.parametrize("ask", [next, list])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_loader_that_asks_its_own_feed_is_refused(depth: int, ask: Callable[[Any], Any]) -> None:
    """The feed would wait for the loader, and the loader for the feed, also where it begins a loop."""
    feeds: list[FeedStream] = []

    def loader() -> Iterator[Any]:
        yield torch.zeros(1)
        yield ask(feeds[0])

    feeds.append(feed(loader(), "cpu", depth))
    next(feeds[0])
    text = (
        r"^wanted a loader that does not ask for batches of its own feed, got one that does, in feed\(\.\.\.\), "
        "which would wait for itself; give it a loader of its own$"
    )
    with pytest.raises(PlanError, match=text):
        next(feeds[0])


def numbers_once_all_are_ahead(batches: FeedStream) -> list[int]:
    """The first number of each batch, looked at when those behind it are loaded."""
    numbers = []
    for batch in batches:
        for slot in batches._ahead:
            batches._engine.wait(slot.variable)
        numbers.append(int(batch[0]))
    return numbers


@pytest.mark.parametrize("kind", ["torch", "numpy", "arrays"])
def test_a_loader_that_later_writes_over_a_batch_is_refused(kind: str) -> None:
    """One buffer that grows with the longest batch so far: new for the first ones, then used again."""
    lengths = [1, 2, 3, 4, *[3] * 60]

    def loader() -> Iterator[Any]:
        memory: Any = torch.empty(0)
        for number, length in enumerate(lengths):
            if len(memory) < length:
                memory = torch.empty(length) if kind == "torch" else np.empty(length)
            memory[:length] = number
            yield torch.from_numpy(memory[:length]) if kind == "numpy" else memory[:length]

    text = (
        r"^wanted batches that stay as they are, got a loader that wrote into one of before while it was loaded "
        r"ahead, in feed\(\.\.\.\); have it make each anew \(a clone\(\) is one\), or use depth=0$"
    )
    with pytest.raises(PlanError, match=text):
        numbers_once_all_are_ahead(feed(loader(), "cpu"))
    assert [int(batch[0]) for batch in feed(loader(), "cpu", 0)] == list(range(len(lengths)))


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_a_loader_that_later_writes_over_the_batch_of_the_loop_is_refused(kind: str) -> None:
    """Two places in turn, from the fifth batch on: what the loop has is filled anew while none waits in it."""

    def loader() -> Iterator[Tensor]:
        places = [np.zeros(3) for _ in range(2)]
        for number in range(12):
            if number < 4:
                yield torch.full((3,), number)
            elif kind == "torch":
                yield torch.from_numpy(places[number % 2]).fill_(number)
            else:
                places[number % 2][:] = number
                yield torch.from_numpy(places[number % 2])

    with pytest.raises(PlanError, match=r"^wanted batches that stay as they are, got a loader"):
        numbers_once_all_are_ahead(feed(loader(), "cpu"))


def test_what_a_pass_that_broke_off_has_shown_does_not_count_in_the_next() -> None:
    """A look at the first batch, then a loop: each pass fills one list of its own."""

    class Loader:
        def __iter__(self) -> Iterator[list[int]]:
            mine = [0]
            for mine[0] in range(6):
                yield mine

    batches = feed(Loader(), "cpu", 1)
    next(iter(batches))
    assert numbers_once_all_are_ahead(batches) == list(range(6))


def test_a_child_forked_while_another_thread_has_its_turn_may_close_the_feed() -> None:
    """The thread is not there to end its turn."""
    is_loading, may_go_on = threading.Event(), threading.Event()

    def loader() -> Iterator[Tensor]:
        is_loading.set()
        may_go_on.wait()
        yield torch.zeros(1)

    batches = feed(loader(), "cpu")
    asking = threading.Thread(target=next, args=(batches,))
    asking.start()
    is_loading.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)  # the child alone: a wait for good ends it
        batches.close()
        os._exit(0)
    may_go_on.set()
    asking.join()
    batches.close()
    assert os.waitpid(child, 0)[1] == 0


def test_results_that_lie_in_no_one_place_pass_to_the_host() -> None:
    """Sparse ones on a CPU have nothing that could be copied over."""
    results = list(to_host([torch.eye(2).to_sparse(), torch.ones(1)]))
    assert torch.equal(results[0].to_dense(), torch.eye(2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_travel_by_themselves_beside_fixed_addresses() -> None:
    """They have neither shape nor strides by which a buffer could stand for them."""
    batches = [torch.nested.nested_tensor([torch.ones(n), torch.zeros(3)]) for n in (1, 2, 4)]
    with feed(batches, "cpu", fixed_addresses=True) as batches_fed:
        found = [[part.tolist() for part in batch.unbind()] for batch in batches_fed]
    assert found == [[[1.0] * n, [0.0] * 3] for n in (1, 2, 4)]
