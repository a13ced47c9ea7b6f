"""The case `straggler`: training on handwritten digits, where one worker is three times as slow.

A synchronous store waits for it at every step. An asynchronous one does not: who is faster takes more of the
steps. What is compared is whether both classify as many of the test images as they should.
"""

import math
import time
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.experiments.ways.case import Case, Contest, Way, WayRemarks, WayRunner
from ridgeline.runtime import kvstore
from ridgeline.tasks.idx import NUM_CLASSES
from ridgeline.tasks.images import count_correct, cross_entropy, load_images
from ridgeline.tasks.mlp import perceptron
from ridgeline.workers.world import World

NAME = "straggler"
SLOWER = 3
"""Times that the last worker takes for a step."""
LEAST_STEPS = 16
"""Of all workers in a run, about."""
TRAINED = 30
"""Runs before test images are classified."""
BATCH, WIDTH, LR = 512, 1024, 0.05
WANTED_ACCURACY = 0.95


Labelled = tuple[Tensor, Tensor]
"""Images, and what they show."""


class _Training(NamedTuple):
    """A worker's part."""

    world: World
    train: Labelled
    test: Labelled
    store: kvstore.KVStore
    model: nn.Module
    generator: torch.Generator


def straggler_case(world: World) -> Case:
    """All workers train, the last of them slowly."""
    return Case(
        name=NAME,
        title=f"handwritten digits, {world.size} workers, the last of which is {SLOWER} times as slow, "
        f"batch {BATCH}",
        prepare=partial(_contest, world),
        units=all_steps(world.size),
        unit="step",
        calls=1,
    )


def _contest(world: World) -> Contest:
    images = load_images()
    train, test = (data.batch(torch.arange(len(data))) for data in (images.train, images.test))
    return Contest(
        ways=[
            Way(f"ridgeline {kind}", whose, partial(_runner, world, train, test, kind))
            for kind, whose in (("dist_sync", "peer"), ("dist_async", "ridgeline"))
        ]
    )


def _runner(world: World, train: Labelled, test: Labelled, kind: str) -> WayRunner:
    # The same model in every worker, and below other samples for each.
    torch.manual_seed(0)
    model = perceptron(train[0][0].numel(), NUM_CLASSES, hidden_sizes=(WIDTH,))
    store = kvstore.create(kind)
    names, parameters = _named(model)
    store.broadcast(names, parameters, parameters)
    # A synchronous push is the sum of all workers; one of an asynchronous store is a worker's own.
    rescale = 1 / world.size if kind == "dist_sync" else 1.0
    store.set_optimizer("sgd", lr=LR, rescale_grad=rescale)
    generator = torch.Generator().manual_seed(world.rank)
    training = _Training(world, train, test, store, model, generator)
    steps = steps_of(world.rank, world.size, kind)

    def results() -> Tensor:
        for _ in range(TRAINED):
            _train(training, steps)
        store.barrier()
        return torch.tensor(float(_accuracy(training) >= WANTED_ACCURACY))

    def remarks() -> WayRemarks:
        return WayRemarks(notes=(f"{_accuracy(training):.1%} of the test images",))

    return WayRunner(
        run=partial(_train, training, steps), results=results, remarks=remarks, close=store.close
    )


def all_steps(workers: int) -> int:
    """Of all workers in a run: as many as can be dealt out by their speed, and equally."""
    both = math.lcm(workers, SLOWER * (workers - 1) + 1)
    return both * max(1, round(LEAST_STEPS / both))


def steps_of(rank: int, workers: int, kind: str) -> int:
    """Of one worker in a run: all take as many where they wait for each other, else as many as they can."""
    if kind == "dist_sync":
        return all_steps(workers) // workers
    shares = [SLOWER] * (workers - 1) + [1]
    return all_steps(workers) * shares[rank] // sum(shares)


def _train(training: _Training, steps: int) -> None:
    """Take steps, each with what the servers have then."""
    world, (images, labels), _, store, model, generator = training
    names, parameters = _named(model)
    for _ in range(steps):
        begin_s = time.perf_counter()
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        loss = cross_entropy(model, (images[chosen], labels[chosen]))
        # As values: the store updates the parameters, so that no optimizer reads `.grad`.
        gradients = torch.autograd.grad(loss, parameters)
        if world.rank == world.size - 1:
            # In proportion to its own step, so that it is as slow on any machine.
            time.sleep((SLOWER - 1) * (time.perf_counter() - begin_s))
        store.pushpull(names, [*gradients], parameters)


def _accuracy(training: _Training) -> float:
    with torch.no_grad():
        return count_correct(training.model, training.test).item() / len(training.test[1])


def _named(model: nn.Module) -> tuple[list[str | int], list[Tensor]]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return [*names], [*parameters]
