"""Case `batches`: a loader that takes most of a step's time, and who hides it."""

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ridgeline.experiments.overlap.loading import SortedBatches, rounds_for
from ridgeline.experiments.parallel.work import normal
from ridgeline.experiments.ways.case import (
    Bound,
    Case,
    Contest,
    Way,
    WayRemarks,
    WayRunner,
    longest,
    simply,
)
from ridgeline.probe.timing import synchronize

BATCHES = {True: 20, False: 50}
"""Quick or not to the batches of a run."""
LOAD_SHARE = 0.8
"""Of a step's seconds, for loading a batch."""
SIDE, PRODUCTS = 384, 10
DEVICE_SIDE, DEVICE_PRODUCTS = 4096, 8
LOAD, COMPUTE = "loading alone", "computing alone"
LOAD_AND_COPY = "loading and copying alone"


def host_batches_case(*, quick: bool) -> Case:
    """On the CPU: a thread loads while another computes."""
    what = f"batches; loading one takes {100 * LOAD_SHARE:.0f} % of a step, on one thread each"
    return _batches_case(BATCHES[quick], what, _host_contest)


def device_batches_case(*, quick: bool) -> Case:
    """On a GPU: a batch of 16 MiB is loaded and copied while the GPU computes."""
    what = f"batches of 16 MiB; loading one takes {50 * LOAD_SHARE:.0f} % of a step"
    return _batches_case(BATCHES[quick], what, _device_contest)


def _batches_case(num: int, what: str, prepare: Callable[[int], Contest]) -> Case:
    return Case(
        name="batches",
        title=f"{num} {what}",
        prepare=partial(prepare, num),
        threads=1,
        units=num,
        unit="batch",
        calls=1,
        hides=True,
    )


class Steps:
    """A step that keeps what it computed, so that nothing is optimised away or left out."""

    def __init__(self, side: int, products: int, device: str) -> None:
        self._weight = normal(side, side, device=device)
        self._products = products

    def __call__(self, batch: Tensor) -> Tensor:
        """Products with the batch; its mean."""
        # The batch is read, so that no way can leave its copy out.
        result = self._weight + batch.mean()
        for _ in range(self._products):
            result = torch.tanh(result @ self._weight)
        return result.mean()

    def over(self, batches: Iterable[Tensor]) -> Tensor:
        """A step on every batch; all means."""
        # Kept on the device: reading a number after each step would wait for it.
        return torch.stack([self(batch) for batch in batches])


def _host_contest(num: int) -> Contest:
    step, shape = Steps(SIDE, PRODUCTS, "cpu"), (SIDE, SIDE)
    data = SortedBatches(num, shape, rounds_for(LOAD_SHARE, lambda: step(torch.zeros(shape))))
    batch = data.load(0)
    return Contest(
        ways=(
            Way("load, then compute", "sequential", simply(lambda: step.over(data))),
            Way("DataLoader, 1 worker process", "peer", partial(_data_loader, data, step, None)),
            Way("ridgeline feed", "ridgeline", partial(_feed, data, step, "cpu")),
        ),
        bound=Bound(
            parts={LOAD: lambda: list(data), COMPUTE: lambda: [step(batch) for _ in range(num)]},
            seconds=longest(LOAD, COMPUTE),
            reason="the longer of loading and computing",
        ),
    )


def _device_contest(num: int) -> Contest:
    step, shape = Steps(DEVICE_SIDE, DEVICE_PRODUCTS, "cuda"), (1024, 4096)
    batch = torch.zeros(shape, device="cuda")

    def once() -> None:
        step(batch)
        synchronize()

    # Half of that share, as the copy comes on top of it.
    data = SortedBatches(num, shape, rounds_for(LOAD_SHARE / 2, once))
    pinned = torch.zeros(shape, pin_memory=True)

    def load_and_copy() -> None:
        for loaded in data:
            pinned.copy_(loaded)
            # Waited for below, since the pinned memory is written again for the next one.
            batch.copy_(pinned, non_blocking=True)
            synchronize()

    return Contest(
        ways=(
            Way(
                "load, copy, then compute",
                "sequential",
                simply(lambda: _each_waited_for(step, (one.to("cuda") for one in data))),
            ),
            Way(
                "DataLoader, pinned, non_blocking",
                "peer",
                partial(_data_loader, data, step, "cuda"),
            ),
            Way(
                "prefetcher by hand",
                "peer",
                partial(_data_loader, data, step, "cuda", through=prefetched),
            ),
            Way("ridgeline feed", "ridgeline", partial(_feed, data, step, "cuda")),
        ),
        bound=Bound(
            parts={
                LOAD_AND_COPY: load_and_copy,
                COMPUTE: lambda: [step(batch) for _ in range(num)],
            },
            seconds=longest(LOAD_AND_COPY, COMPUTE),
            reason="the longer of loading with copying, and computing",
        ),
    )


def _each_waited_for(step: Steps, batches: Iterable[Tensor]) -> Tensor:
    """Really one after the other: the GPU is idle while a batch is loaded."""
    means: list[Tensor] = []
    for batch in batches:
        means.append(step(batch))
        synchronize()
    return torch.stack(means)


def _copied(batches: Iterable[Tensor]) -> Iterable[Tensor]:
    return (batch.to("cuda", non_blocking=True) for batch in batches)


def _data_loader(
    data: SortedBatches,
    step: Steps,
    device: str | None,
    *,
    through: Callable[[Iterable[Tensor]], Iterable[Tensor]] = _copied,
) -> WayRunner:
    """The loader of torch with one worker process, which is started once and kept."""
    # Started afresh: a fork would copy a process whose threads hold locks.
    held: list[DataLoader[Any]] = [
        DataLoader(
            data,
            batch_size=None,
            num_workers=1,
            pin_memory=device is not None,
            persistent_workers=True,
            multiprocessing_context="forkserver",
        )
    ]

    def close() -> None:
        held.clear()  # the loader ends its workers when nothing refers to it
        gc.collect()

    def run() -> Tensor:
        return step.over(held[0] if device is None else through(held[0]))

    return WayRunner(run=run, close=close)


def _feed(data: SortedBatches, step: Steps, device: str) -> WayRunner:
    from ridgeline.feeding import feed

    reports: list[str] = []

    def run() -> Tensor:
        with feed(data, device) as batches:
            means = step.over(batches)
            reports[:] = [repr(batches.report())]
        return means

    return WayRunner(run=run, remarks=lambda: WayRemarks(notes=tuple(reports)))


def prefetched(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Batches on the GPU; the next one's copy is enqueued before this one is given out.

    Args:
        batches: Pinned batches on the CPU, as of a `DataLoader` with `pin_memory`.
    """
    side = torch.cuda.Stream()
    source = iter(batches)
    following = _send(source, side)
    while following is not None:
        # The batch is used only when its copy is there.
        torch.cuda.current_stream().wait_stream(side)
        batch = following
        # It was allocated on the side stream, which would else give its memory away while it is read.
        batch.record_stream(torch.cuda.current_stream())
        following = _send(source, side)
        yield batch


def _send(source: Iterator[Tensor], side: torch.cuda.Stream) -> Tensor | None:
    batch = next(source, None)
    if batch is None:
        return None
    with torch.cuda.stream(side):
        return batch.to("cuda", non_blocking=True)
