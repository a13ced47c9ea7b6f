"""Case `host-and-device`: CPU and GPU compute side by side, and the GPU's results come to the CPU."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.experiments.parallel.work import Work, chain, normal, parallelized
from ridgeline.experiments.ways.case import Bound, Case, Contest, Way, WayRunner, longest, simply
from ridgeline.probe.timing import synchronize

SIDE, DEVICE_SIDE = 1024, 4096
PRODUCTS, DEVICE_PRODUCTS = 10, 10
HOST, DEVICE = "the CPU alone", "the GPU and its copy alone"


def host_and_device_case() -> Case:
    """A chain of products on each; the GPU's corner is copied and added to the CPU's result."""
    return Case(
        name="host-and-device",
        title=(
            f"{PRODUCTS} products of {SIDE} x {SIDE} on the CPU beside {DEVICE_PRODUCTS} of "
            f"{DEVICE_SIDE} x {DEVICE_SIDE} on the GPU, copied and added; float32"
        ),
        prepare=_contest,
        calls=1,
        hides=True,
    )


def _contest() -> Contest:
    a = normal(SIDE, SIDE, seed=1)
    b = normal(DEVICE_SIDE, DEVICE_SIDE, device="cuda", seed=2)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        remote = chain(y, DEVICE_PRODUCTS).to("cpu")
        return chain(x, PRODUCTS) + remote[:SIDE, :SIDE]

    def device_piece() -> Tensor:
        return chain(b, DEVICE_PRODUCTS).to("cpu")

    pinned = torch.empty_like(b, device="cpu", pin_memory=True)

    def device_alone() -> Tensor:
        # Into pinned memory, which no other copy beats.
        pinned.copy_(chain(b, DEVICE_PRODUCTS), non_blocking=True)
        synchronize()
        return pinned

    work = Work(
        fn=fn,
        inputs=(a, b),
        pieces=(lambda: chain(a, PRODUCTS), device_piece),
        join=lambda parts: parts[0] + parts[1][:SIDE, :SIDE],
    )
    return Contest(
        ways=(
            Way("one by one", "sequential", simply(partial(fn, a, b))),
            Way("torch, pinned and non_blocking by hand", "peer", partial(_by_hand, a, b)),
            Way("ridgeline engine", "ridgeline", partial(_engine, a, b)),
            parallelized(work),
        ),
        bound=Bound(
            parts={HOST: work.pieces[0], DEVICE: device_alone},
            seconds=longest(HOST, DEVICE),
            reason="the longer of the two",
        ),
    )


def _by_hand(a: Tensor, b: Tensor) -> WayRunner:
    """Enqueue the GPU's work and its copy, compute on the CPU meanwhile, wait, add."""
    pinned = torch.empty_like(b, device="cpu", pin_memory=True)

    def run() -> Tensor:
        pinned.copy_(chain(b, DEVICE_PRODUCTS), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        local = chain(a, PRODUCTS)
        copied.synchronize()
        return local + pinned[:SIDE, :SIDE]

    return WayRunner(run=run)


def _engine(a: Tensor, b: Tensor) -> WayRunner:
    """Three tasks and two variables; the order of pushing is that of the sequential program."""
    from ridgeline.engine import Engine
    from ridgeline.engine.lanes.streams import device_lanes

    index = torch.cuda.current_device()
    engine = Engine(lanes=device_lanes(torch.device("cuda", index)))
    remote, local = engine.variable("remote"), engine.variable("local")
    pinned = torch.empty_like(b, device="cpu", pin_memory=True)
    held: dict[str, Any] = {}

    def compute() -> None:
        held["remote"] = chain(b, DEVICE_PRODUCTS)

    def copy() -> None:
        pinned.copy_(held["remote"], non_blocking=True)

    def add() -> None:
        held["sum"] = chain(a, PRODUCTS)

    def run() -> Tensor:
        engine.push(compute, writes=(remote,), lane=f"compute:{index}")
        engine.push(copy, writes=(remote,), lane=f"copy-out:{index}")
        engine.push(add, writes=(local,), lane="host")
        engine.wait(remote)
        engine.wait(local)
        synchronize()  # a wait for a device lane holds the stream, not the host
        return held["sum"] + pinned[:SIDE, :SIDE]

    return WayRunner(run=run, close=engine.close)
