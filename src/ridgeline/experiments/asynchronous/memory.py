"""Case `memory`: a producer far faster than its consumer, with and without a bound on the queue."""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from ridgeline.engine import Engine
from ridgeline.experiments.ways.case import (
    Bound,
    Case,
    Contest,
    Way,
    WayRemarks,
    WayRunner,
    longest,
)

ITEMS = {True: 64, False: 256}
"""Quick or not to the items of a run."""
ITEM_BYTES = 1 << 18
BOUND_BYTES = 8 * ITEM_BYTES
BATCH = 4
"""Items of a mini-batch."""
SIDE = 256
PRODUCTS = 4
"""Matrix products with which an item is consumed: some milliseconds, against some 30 us to make it."""
MAKE, CONSUME = "making alone", "consuming alone"


def memory_case(*, quick: bool) -> Case:
    """Items made at once and consumed slowly on another thread."""
    num = ITEMS[quick]
    return Case(
        name="memory",
        title=f"{num} items of 256 KiB, consumed far more slowly than they are made",
        prepare=partial(_contest, num),
        threads=1,
        units=num,
        unit="item",
        calls=1,
    )


class Items:
    """Makes and consumes items, and counts the bytes of those that are alive."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.peak_bytes = 0
        self._bytes = 0
        self._lock = threading.RLock()  # an item may die inside `produce`, in the same thread
        generator = torch.Generator().manual_seed(0)
        self._weight = torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5
        self._total = 0.0

    def begin(self) -> None:
        """Forget what was counted."""
        self._total = 0.0

    def produce(self, index: int) -> Tensor:
        """An item; it counts until it is released."""
        item = torch.full((ITEM_BYTES // 4,), float(index))
        with self._lock:
            self._bytes += ITEM_BYTES
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        # Counted until the tensor dies, whoever holds it by then.
        weakref.finalize(item, self._forget)
        return item

    def consume(self, item: Tensor) -> None:
        """Far slower than making it."""
        result = item[: SIDE * SIDE].view(SIDE, SIDE)
        for _ in range(PRODUCTS):
            result = result @ self._weight
        self._total += float(result.mean())

    def total(self) -> float:
        """Of everything consumed."""
        return self._total

    def _forget(self) -> None:
        with self._lock:
            self._bytes -= ITEM_BYTES


def _contest(num: int) -> Contest:
    # Items of their own: those of the parts must not count towards the peak of a way.
    parts = Items(num)
    item = parts.produce(1)
    return Contest(
        ways=(
            Way("one by one", "sequential", partial(_one_by_one, num)),
            Way("concurrent.futures, unbounded", "peer", partial(_pool, num)),
            Way(
                "ridgeline engine, at most 2 MiB",
                "ridgeline",
                partial(_engine, num, BOUND_BYTES, 0),
            ),
            Way(
                f"ridgeline engine, batches of {BATCH}",
                "ridgeline",
                partial(_engine, num, None, BATCH),
            ),
        ),
        bound=Bound(
            parts={
                MAKE: lambda: [float(parts.produce(1)[0]) for _ in range(num)],
                CONSUME: lambda: [parts.consume(item) for _ in range(num)],
            },
            seconds=longest(MAKE, CONSUME),
            reason="the longer of making and consuming",
        ),
    )


def _remarks(items: Items) -> WayRemarks:
    return WayRemarks(peak_bytes=items.peak_bytes)


def _one_by_one(num: int) -> WayRunner:
    items = Items(num)

    def run() -> float:
        items.begin()
        for index in range(num):
            items.consume(items.produce(index))
        return items.total()

    return WayRunner(run=run, remarks=partial(_remarks, items))


def _pool(num: int) -> WayRunner:
    items, pool = Items(num), ThreadPoolExecutor(1)

    def run() -> float:
        items.begin()
        futures = [pool.submit(items.consume, items.produce(index)) for index in range(num)]
        for future in futures:
            future.result()
        return items.total()

    return WayRunner(run=run, close=pool.shutdown, remarks=partial(_remarks, items))


def _engine(num: int, max_bytes: int | None, batch: int) -> WayRunner:
    """An engine that bounds the bytes of pending items, or that waits at the end of mini-batches."""
    # Items of its own, whose peak is that of this way.
    items, engine = Items(num), Engine(max_bytes=max_bytes)
    consumed = engine.variable("consumed")

    def push(item: Tensor) -> None:
        task: Callable[[], None] = partial(items.consume, item)
        # The bytes are what the bound of the engine counts.
        engine.push(task, writes=(consumed,), lane="loader", name="consume", num_bytes=ITEM_BYTES)

    def run() -> float:
        items.begin()
        for index in range(num):
            push(items.produce(index))
            if batch and index % batch == batch - 1:
                engine.end_batch()
        engine.wait(consumed)
        return items.total()

    return WayRunner(run=run, close=engine.close, remarks=partial(_remarks, items))
