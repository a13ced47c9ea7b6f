"""The sampler: every order is a permutation, slices are equal, and nothing is loaded to skip."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ridgeline.errors import DataError, PlanError
from ridgeline.runtime.training.sampler import (
    Sampler,
    equal_parts,
    num_steps,
    permutation,
    worker_slice,
)
from ridgeline.workers.world import World


def world(rank: int, size: int) -> World:
    return World(rank, size, rank, torch.device("cpu"))


def numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


sizes = st.tuples(st.integers(1, 200), st.integers(1, 20), st.integers(1, 5), st.integers(0, 2**40))


@given(sizes)
def test_workers_share_every_batch_equally(drawn: tuple[int, int, int, int]) -> None:
    """Workers' slices are disjoint, of one size, and leave out fewer samples than there are workers."""
    count, per_worker, workers, seed = drawn
    batch_size = per_worker * workers
    order = permutation(count, seed=seed, epoch=1)
    steps = num_steps(count, batch_size=batch_size, workers=workers)
    seen: list[int] = []
    for step in range(steps):
        parts = [
            worker_slice(order, step, batch_size=batch_size, rank=rank, workers=workers).tolist()
            for rank in range(workers)
        ]
        assert len({len(part) for part in parts}) == 1
        assert parts[0]
        seen += [index for part in parts for index in part]
    assert len(set(seen)) == len(seen)
    assert count - len(seen) < workers


@given(st.integers(1, 100), st.integers(0, 2**62), st.integers(0, 1000))
def test_order_is_a_permutation_fixed_by_seed_and_epoch(count: int, seed: int, epoch: int) -> None:
    """The same seed and epoch give the same permutation, without touching the global random state."""
    state = torch.get_rng_state()
    order = permutation(count, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert torch.equal(order, permutation(count, seed=seed, epoch=epoch))
    assert torch.equal(state, torch.get_rng_state())


def test_epochs_and_seeds_differ() -> None:
    """Another epoch or another seed is another order."""
    orders = {
        tuple(permutation(50, seed=seed, epoch=epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_mean_of_worker_means_is_the_mean_of_the_batch() -> None:
    """Over exactly representable samples the mean of means equals the mean of all that were used."""
    samplers = [Sampler(numbers(21), 8, world(rank, 2), seed=0) for rank in range(2)]
    for step in range(samplers[0].steps_per_epoch):
        parts = [sampler.batch(0, step)[0].double() for sampler in samplers]
        assert sum(part.mean() for part in parts) / 2 == torch.cat(parts).mean()
        assert samplers[0].samples_at(step) == sum(len(part) for part in parts)


def test_starting_in_the_middle_loads_nothing_before() -> None:
    """`first_step` skips batches without asking the data set for them."""
    asked: list[int] = []

    class Spy(Dataset[Any]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> Tensor:
            asked.append(index)
            return torch.tensor(index)

    sampler = Sampler(Spy(), 4, world(0, 1), seed=1)
    epoch = sampler.epoch(0, first_step=2)
    (batch,) = list(epoch)
    assert len(epoch) == 1
    assert asked == batch.tolist() == sampler.order(0)[8:].tolist()


def test_own_batch_function_is_used() -> None:
    """A data set with `batch(indices)` is asked for whole batches."""

    class Whole(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def batch(self, indices: Tensor) -> Tensor:
            return indices * 10

    assert sorted(Sampler(Whole(), 4, world(0, 1), seed=1).batch(0, 0).tolist()) == [0, 10, 20, 30]


@given(st.integers(0, 50), st.integers(1, 7))
def test_equal_parts_cover_everything_once(count: int, parts: int) -> None:
    """Parts follow each other without gap and differ by at most one in length."""
    ranges = equal_parts(count, parts)
    assert [i for part in ranges for i in part] == list(range(count))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_batches_that_cannot_be_shared_are_refused() -> None:
    """The message names the nearest batch sizes that fit."""
    with pytest.raises(PlanError) as caught:
        Sampler(numbers(10), 8, world(0, 3), seed=0)
    assert str(caught.value) == (
        "wanted a global batch that 3 workers can share equally, got batch size 8; use --batch-size 6 or 9"
    )


def test_data_without_samples_is_refused() -> None:
    """Empty data, data without a length, and fewer samples than workers are named."""

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(DataError, match="wanted at least one sample of training data, got 0"):
        Sampler(numbers(0), 4, world(0, 1), seed=0)
    with pytest.raises(DataError, match="wanted map-style training data with a length, got Stream"):
        Sampler(Stream(), 4, world(0, 1), seed=0)
    with pytest.raises(
        DataError, match="wanted at least one sample per worker, got 1 samples for 2"
    ):
        Sampler(numbers(1), 4, world(0, 2), seed=0)
