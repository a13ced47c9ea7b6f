"""Cases on GPUs: one after the other, streams by hand, CUDA graphs, and ours."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.experiments.contests import captured
from ridgeline.experiments.parallel.host_and_device import host_and_device_case
from ridgeline.experiments.parallel.work import (
    Work,
    branches,
    cell,
    independent,
    parallelized,
    perceptron_step,
    squares_on,
)
from ridgeline.experiments.ways.case import Bound, Case, Contest, Way, WayRunner, longest, simply
from ridgeline.probe.timing import synchronize

TWO = ("cuda:0", "cuda:1")
ONE_ALONE = "one of them alone"


def gpu_cases(*, quick: bool) -> list[Case]:
    """The seeds' two GPUs, and the exercises."""
    lacking = "" if torch.cuda.device_count() > 1 else "needs two CUDA devices"
    num = 10 if quick else 50
    # Made when the case is held: its weights are on both GPUs.
    perceptron = partial(perceptron_step, TWO, 1024, 4096)
    return [
        Case(
            name="devices",
            title=f"{num} products of 4000 x 4000 on each of two GPUs; float32",
            prepare=lambda: _over_devices(squares_on(TWO, 4000, num)),
            lacking=lacking,
            calls=1,
            weight=2.0,
        ),
        Case(
            name="operators",
            title="8 independent products, 4000 x 4000, on one GPU; float32",
            prepare=lambda: _over_streams(independent("cuda", 4000, 8)),
        ),
        Case(
            name="small",
            title="32 independent products, 256 x 256, on one GPU; float32",
            prepare=lambda: _over_streams(independent("cuda", 256, 32)),
        ),
        host_and_device_case(),
        Case(
            name="branches",
            title="Inception block, 28 x 28 x 192, batch 1, forward and backward; float32",
            prepare=lambda: _over_streams(branches("cuda", 28, 192), can_alone=False),
        ),
        Case(
            name="cell",
            title="normal cell of NASNet-A, 28 x 28 x 44, batch 1, forward and backward; float32",
            prepare=lambda: _over_streams(cell("cuda", 28, 44), can_alone=False),
        ),
        Case(
            name="perceptron",
            title="two layers of 4096, half of 2048 samples on each of two GPUs (figure 12.3.1); float32",
            prepare=lambda: _over_devices(perceptron()),
            lacking=lacking,
        ),
    ]


def _over_devices(work: Work) -> Contest:
    """Two GPUs: one waited for before the other begins; both enqueued; ours."""

    def one_by_one() -> Any:
        done: list[Any] = []
        for piece in work.pieces:
            done.append(piece())
            # Or the second GPU would begin while the first still computes.
            synchronize()
        return work.join(done)

    parts = {f"{device} alone": piece for device, piece in zip(TWO, work.pieces, strict=True)}
    return Contest(
        ways=(
            Way("one by one", "sequential", simply(one_by_one)),
            Way("torch, both enqueued", "peer", simply(partial(work.fn, *work.inputs))),
            parallelized(work),
        ),
        bound=Bound(
            parts=parts, seconds=longest(*parts), reason="the slower of the two GPUs alone"
        ),
    )


def _over_streams(work: Work, *, can_alone: bool = True) -> Contest:
    """One GPU: operator by operator, streams by hand, both captured, ours."""
    whole = partial(work.fn, *work.inputs)
    by_hand = partial(_on_streams, work, [torch.cuda.Stream() for _ in work.pieces[:8]])
    # Replayed, or launching a small one would be the longest part of it.
    alone = _replayed(work.pieces[0]).run if can_alone else None
    return Contest(
        ways=(
            Way("operator by operator", "sequential", simply(whole)),
            Way("torch, streams by hand", "peer", simply(by_hand)),
            Way("torch, CUDA graph", "peer", partial(_replayed, whole)),
            Way("torch, streams by hand, CUDA graph", "peer", partial(_replayed, by_hand)),
            parallelized(work),
        ),
        bound=_bound(whole, alone),
    )


def _bound(whole: Callable[[], Any], alone: Callable[[], Any] | None) -> Bound:
    """All FLOP at the measured rate of large products, and no less than one operator takes."""
    from ridgeline.experiments.hybrid.limit import CountFlops, matmul_rate

    with CountFlops() as counted:
        whole()
    least_s = counted.total / matmul_rate("cuda", torch.float32)
    reason = "all FLOP at the measured rate of large products"
    if alone is None:
        return Bound(parts={}, seconds=lambda seconds: least_s, reason=reason)
    return Bound(
        parts={ONE_ALONE: alone},
        seconds=lambda seconds: max(least_s, seconds[ONE_ALONE]),
        reason=f"one operator alone, or {reason}",
    )


def _on_streams(work: Work, streams: Sequence[torch.cuda.Stream]) -> Any:
    """What a person writes: fork, a piece on every stream in turn, join."""
    current = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(current)
    done = []
    for index, piece in enumerate(work.pieces):
        with torch.cuda.stream(streams[index % len(streams)]):
            result = piece()
        # A graph that is being captured keeps all of its memory anyway.
        if isinstance(result, Tensor) and not torch.cuda.is_current_stream_capturing():
            result.record_stream(current)
        done.append(result)
    for stream in streams:
        current.wait_stream(stream)
    return work.join(done)


def _replayed(fn: Callable[[], Any]) -> WayRunner:
    graph, results = captured(fn)

    def run() -> Any:
        graph.replay()
        return results

    return WayRunner(run=run, close=graph.reset)
