"""Which samples each worker sees at each step, as a pure function of seed, epoch and step.

Every epoch is a permutation of the data set by (seed, epoch), cut into global batches. A worker takes
its contiguous slice of every batch, all slices being equal, so that the mean of the workers' means is
exactly the mean over the batch. Of an uneven last batch each worker takes `n // workers` samples; the
few left over (fewer than workers) are left out of that epoch, and others the next time. Nothing has
to be loaded to start in the middle.
"""

import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ridgeline.errors import DataError, PlanError
from ridgeline.runtime.training.fetching import batches, fetch
from ridgeline.workers.world import World


def permutation(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """The order of one epoch: int64 [num_samples], the same on every worker and machine."""
    # Not `seed + epoch`: then epoch 1 of one seed would be epoch 0 of the next.
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    # On the CPU on any host, so that the order is the same with and without a GPU.
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(num_samples, generator=generator, device="cpu")


def num_steps(num_samples: int, *, batch_size: int, workers: int) -> int:
    """Steps per epoch: global batches in which every worker gets at least one sample."""
    whole, rest = divmod(num_samples, batch_size)
    return whole + (rest >= workers)


def worker_slice(order: Tensor, step: int, *, batch_size: int, rank: int, workers: int) -> Tensor:
    """The indices of worker `rank` at a step of the epoch `order`: its slice of the global batch.

    Args:
        order: The epoch's permutation, int64 [num_samples].
        step: Step within the epoch.
        batch_size: Samples per step over all workers together.
        rank: This worker.
        workers: Number of workers.
    """
    begin = step * batch_size
    # Also in the last, shorter batch all workers get as many: a mean of means is that of the batch then.
    each = min(batch_size, len(order) - begin) // workers
    return order.narrow(0, begin + rank * each, each)


def length(dataset: Dataset[Any], what: str) -> int:
    """Number of samples.

    Raises:
        DataError: the data set has no length (it is iterable only), or is empty.
    """
    try:
        count = len(dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise DataError(
            f"wanted map-style {what} with a length, got {type(dataset).__name__} without one in the "
            "task; give it `__len__` and `__getitem__`"
        ) from error
    if count == 0:
        raise DataError(f"wanted at least one sample of {what}, got 0 in the task; check its files")
    return count


class Epoch:
    """The batches of one epoch for one worker, from a step on; iterating loads them."""

    def __init__(self, sampler: "Sampler", epoch: int, first_step: int) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._first_step = first_step

    def __len__(self) -> int:
        return max(0, self._sampler.steps_per_epoch - self._first_step)

    def __iter__(self) -> Iterator[Any]:
        order = self._sampler.order(self._epoch)
        steps = range(self._first_step, self._sampler.steps_per_epoch)
        slices = (self._sampler.slice_of(order, step) for step in steps)
        return batches(self._sampler.dataset, slices)


class Sampler:
    """One worker's share of a data set.

    Attributes:
        dataset: A map-style data set; `dataset.batch(indices)` is used where it exists.
        steps_per_epoch: Steps of a whole epoch, the same on every worker.

    Args:
        dataset: See above.
        batch_size: Samples per step over all workers together.
        world: This worker's place.
        seed: Of the order.

    Raises:
        DataError: the data set is empty, smaller than the number of workers, or has no length.
        PlanError: the batch cannot be cut into equal slices.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, world: World, *, seed: int) -> None:
        check_batch_size(batch_size, world.size)
        self.dataset = dataset
        self.num_samples = length(dataset, "training data")
        self.steps_per_epoch = num_steps(
            self.num_samples, batch_size=batch_size, workers=world.size
        )
        if self.steps_per_epoch == 0:
            raise DataError(
                f"wanted at least one sample per worker, got {self.num_samples} samples for "
                f"{world.size} workers in the task's training data; use fewer workers"
            )
        self._batch_size = batch_size
        self._world = world
        self._seed = seed

    def epoch(self, epoch: int, *, first_step: int = 0) -> Epoch:
        """The batches of an epoch from `first_step` on."""
        return Epoch(self, epoch, first_step)

    def batch(self, epoch: int, step: int) -> Any:
        """One batch of this worker, loaded now."""
        return fetch(self.dataset, self.slice_of(self.order(epoch), step))

    def order(self, epoch: int) -> Tensor:
        """The permutation of an epoch."""
        return permutation(self.num_samples, seed=self._seed, epoch=epoch)

    def slice_of(self, order: Tensor, step: int) -> Tensor:
        """This worker's indices at a step of an epoch's order."""
        return worker_slice(
            order,
            step,
            batch_size=self._batch_size,
            rank=self._world.rank,
            workers=self._world.size,
        )

    def samples_at(self, step: int) -> int:
        """Samples that all workers together train on at a step of an epoch."""
        rest = self.num_samples - step * self._batch_size
        return min(self._batch_size, rest) // self._world.size * self._world.size


def check_batch_size(batch_size: int, workers: int, others: Collection[int] = ()) -> None:
    """Reject a global batch that cannot be cut into equal slices.

    Args:
        batch_size: Samples of all workers together.
        workers: Who share them.
        others: Numbers of workers that are to share the same batch; the sizes named fit them, too.

    Raises:
        PlanError: `batch_size` is no multiple of `workers`.
    """
    if batch_size % workers:
        shared = math.lcm(workers, *others)
        below = batch_size // shared * shared
        fitting = " or ".join(str(size) for size in (below, below + shared) if size)
        raise PlanError(
            f"wanted a global batch that {workers} workers can share equally, got batch size "
            f"{batch_size}; use --batch-size {fitting}"
        )


def equal_parts(count: int, parts: int) -> Sequence[range]:
    """Contiguous ranges over `count` samples whose lengths differ by at most one."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]
