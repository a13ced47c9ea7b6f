"""Cases on the CPU: one thread per operator, several at a time, against threads inside an operator."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.experiments.contests import scripted
from ridgeline.experiments.parallel.work import (
    Work,
    branches,
    cell,
    chain,
    chains,
    independent,
    parallelized,
    perceptron_step,
)
from ridgeline.experiments.ways.case import Bound, Case, Contest, Way, WayRunner, simply
from ridgeline.probe.host.fingerprint import num_cores
from ridgeline.workers.host_threads import set_threads

FIRST = "one by one, 1 thread"
SHARE = "the share of one thread"


def thread_cases(*, quick: bool) -> list[Case]:
    """The cases of a machine without a GPU; the two devices are two threads."""
    made: Sequence[tuple[str, str, Callable[[], Work]]] = (
        (
            "devices",
            "two chains of 20 products, 160 x 160; a thread each",
            partial(chains, 160, 20),
        ),
        ("operators", "8 independent products, 384 x 384", partial(independent, "cpu", 384, 8)),
        ("small", "32 independent products, 96 x 96", partial(independent, "cpu", 96, 32)),
        (
            "branches",
            "Inception block, 28 x 28 x 64, batch 1, forward and backward",
            partial(branches, "cpu", 28, 64),
        ),
        (
            "cell",
            "normal cell of NASNet-A, 28 x 28 x 44, batch 1, forward and backward",
            partial(cell, "cpu", 28, 44),
        ),
        (
            "perceptron",
            "two layers of 256, half of 256 samples on each of two threads (figure 12.3.1)",
            partial(perceptron_step, ("cpu", "cpu"), 128, 256),
        ),
    )
    cases = [
        Case(name=name, title=f"{title}; float32", prepare=partial(_contest, name, make), threads=1)
        for name, title, make in made
    ]
    side_by_side = Case(
        name="host-and-device",
        title="a chain on the CPU beside a chain on the GPU, results copied and added",
        prepare=lambda: Contest(ways=()),
        lacking="needs a CUDA device",
    )
    return [*cases[:3], side_by_side, *cases[3:]]


def _contest(name: str, make: Callable[[], Work]) -> Contest:
    work = make()
    cores = num_cores()
    whole = partial(work.fn, *work.inputs)
    lacking = "" if cores > 1 else "needs two cores"
    ways = [
        Way(FIRST, "sequential", simply(whole)),
        Way(
            f"torch, {cores} threads inside operators",
            "peer",
            simply(whole, threads=cores),
            lacking,
        ),
        Way("ThreadPoolExecutor by hand", "peer", partial(_pool, work, cores), lacking),
    ]
    # Only these are written for TorchScript below.
    if name in ("devices", "operators", "small"):
        ways.append(Way("torch.jit.fork", "peer", partial(_forked, name, work), lacking))
    return Contest(ways=(*ways, parallelized(work)), bound=_bound(work, cores))


def _bound(work: Work, workers: int) -> Bound:
    """All work dealt out evenly to the threads, and no less than the pieces that fall to one."""
    threads = min(workers, len(work.pieces))
    # Dealt out in turn, as pieces differ in size and the thread with most of them ends last.
    share = work.pieces[::threads]
    return Bound(
        parts={SHARE: lambda: [piece() for piece in share]},
        seconds=lambda seconds: max(seconds[FIRST] / workers, seconds[SHARE]),
        reason=f"all work dealt out evenly to {threads} threads",
    )


def _pool(work: Work, workers: int) -> WayRunner:
    """Every piece submitted; what joins them runs in the calling thread."""
    # Threads of OpenMP are counted for each calling thread, so that each of these is told.
    pool = ThreadPoolExecutor(
        min(workers, len(work.pieces)), initializer=set_threads, initargs=(1,)
    )

    def run() -> Any:
        futures = [pool.submit(piece) for piece in work.pieces]
        return work.join([future.result() for future in futures])

    return WayRunner(run=run, close=pool.shutdown)


def _forked(name: str, work: Work) -> WayRunner:
    """TorchScript's own tasks, on its inter-operator threads."""
    script = _scripts()["chains" if name == "devices" else "products"]
    if name == "devices":
        return WayRunner(run=lambda: script(*work.inputs, 20))
    inputs = list(work.inputs)
    return WayRunner(run=lambda: script(inputs))


@functools.cache
def _scripts() -> dict[str, Any]:
    """The two functions as TorchScript."""
    return {"chains": scripted(_forked_chains), "products": scripted(_forked_products)}


# TorchScript reads the source of these.
def _forked_chains(a: Tensor, b: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Two chains, the first in a task of its own."""
    first = torch.jit.fork(chain, a, num)
    second = chain(b, num)
    return torch.jit.wait(first), second


def _square(x: Tensor) -> Tensor:
    return x.mm(x)


def _forked_products(xs: list[Tensor]) -> list[Tensor]:
    """A task for every product."""
    tasks = [torch.jit.fork(_square, x) for x in xs]
    return [torch.jit.wait(task) for task in tasks]
