"""Case `results`: the seeds' experiment, products on the GPU of which each is copied to the host."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

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

SIDE = 4000
PRODUCTS = {True: 10, False: 50}
"""Quick or not to the products of a run; 50 are the seeds'."""
COMPUTE, COPY = "computing alone", "copying alone (pinned)"


def results_case(device: str, *, quick: bool) -> Case:
    """`num` products, and all of them on the host."""
    num = PRODUCTS[quick]
    return Case(
        name="results",
        title=f"{num} products of {SIDE} x {SIDE} in float32, each copied to the host",
        prepare=partial(_contest, num),
        lacking="" if device == "cuda" else "needs a CUDA device: on a CPU results are on the host",
        calls=1,
        hides=True,
        weight=2.0,
    )


def _contest(num: int) -> Contest:
    x = normal(SIDE, SIDE, device="cuda")
    # Two: one is read on the host while the other is filled.
    ring = [torch.empty(SIDE, SIDE, pin_memory=True) for _ in range(2)]
    result = x.mm(x)

    def copies() -> None:
        for index in range(num):
            ring[index % 2].copy_(result, non_blocking=True)

    return Contest(
        ways=(
            Way(
                "compute, then copy (pageable)", "sequential", simply(partial(_sequential, x, num))
            ),
            Way("torch, non_blocking", "peer", simply(partial(_non_blocking, x, num))),
            Way("torch, pinned ring by hand", "peer", partial(_by_hand, x, num, ring)),
            Way("ridgeline to_host", "ridgeline", partial(_ours, x, num)),
        ),
        bound=Bound(
            parts={COMPUTE: lambda: [x.mm(x) for _ in range(num)], COPY: copies},
            seconds=longest(COMPUTE, COPY),
            reason="the longer of computing and copying",
        ),
    )


def _sequential(x: Tensor, num: int) -> float:
    """The seeds' first: everything is computed before anything is copied."""
    results = [x.mm(x) for _ in range(num)]
    torch.cuda.synchronize()
    return _sum([result.to("cpu") for result in results])


def _non_blocking(x: Tensor, num: int) -> float:
    """The seeds' second: the copies are asked for without waiting."""
    results = [x.mm(x) for _ in range(num)]
    copied = [result.to("cpu", non_blocking=True) for result in results]
    torch.cuda.synchronize()
    return _sum(copied)


def _by_hand(x: Tensor, num: int, ring: list[Tensor]) -> WayRunner:
    """What a careful person writes: a side stream, pinned memory, an event per slot."""
    side = torch.cuda.Stream()
    copied = [torch.cuda.Event() for _ in ring]

    def run() -> float:
        total = 0.0
        for index in range(num + len(ring)):
            slot = index % len(ring)
            if index >= len(ring):
                # A slot is read before it is filled again.
                copied[slot].synchronize()
                total += float(ring[slot][0, 0])
            if index < num:
                result = x.mm(x)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    ring[slot].copy_(result, non_blocking=True)
                    copied[slot].record()
                # Its memory must not be given away before the copy has read it.
                result.record_stream(side)
        return total

    return WayRunner(run=run)


def _ours(x: Tensor, num: int) -> WayRunner:
    """A generator of results, and an iterator over the same on the host."""
    from ridgeline.feeding import to_host

    reports: list[str] = []

    def run() -> float:
        stream = to_host(x.mm(x) for _ in range(num))
        total = _sum(stream)
        reports[:] = [repr(stream.report())]
        return total

    return WayRunner(run=run, remarks=lambda: WayRemarks(notes=tuple(reports)))


def _sum(results: Iterable[Tensor]) -> float:
    """One number of every result, so that each is looked at."""
    return sum(float(result[0, 0]) for result in results)
