"""Case `queue` without a GPU: the front end draws inputs, a thread of the engine computes with them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from ridgeline import units
from ridgeline.engine import Engine
from ridgeline.experiments.ways.case import Bound, Case, Contest, Way, WayRunner, simply

OPERATIONS = {True: 200, False: 1000}
"""Quick or not to the operations of a run."""
BATCH = 50
"""Operations of a mini-batch."""
SIDE = 192
DRAWN = 128
"""Rows that the front end draws for an operation, which takes about half as long as the product."""
ISSUE, COMPUTE, RETURN = "t1: issuing alone", "t2: computing alone", "t3: returning alone"


def host_queue_case(*, quick: bool) -> Case:
    """N operations, each on what the one before it left."""
    num = OPERATIONS[quick]
    title = f"{num} operations of {SIDE} x {SIDE} in float32, each on the last one's result"
    return Case(
        name="queue",
        title=f"{title}; the back end is one thread",
        prepare=partial(_contest, num),
        threads=1,
        units=num,
        unit="operation",
        calls=1,
    )


class HostChain:
    """A chain of operations: `issue` draws an input, `compute` folds it in, `fetch` reads the result."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._generator = torch.Generator().manual_seed(0)
        self._weight = torch.randn(SIDE, SIDE, generator=self._generator) / SIDE**0.5
        self._state = torch.zeros(SIDE, SIDE)

    def begin(self) -> None:
        """From the start: the same inputs again, and a state of zeros."""
        # Not the seed of the weights, which the inputs would repeat.
        self._generator.manual_seed(1)
        self._state = torch.zeros(SIDE, SIDE)

    def issue(self) -> Tensor:
        """What the front end does for one operation (t1)."""
        return torch.randn(DRAWN, SIDE, generator=self._generator)

    def compute(self, drawn: Tensor) -> None:
        """What the back end does (t2)."""
        state = torch.tanh(self._state @ self._weight)
        state[:DRAWN] += drawn
        self._state = state

    def fetch(self) -> list[float]:
        """The result as the caller wants it (t3)."""
        return self._state[0].tolist()


def queued(
    work: HostChain, push: Callable[[Callable[[], None]], None], pace: Callable[[int], None]
) -> float:
    """Queue every operation, pacing after each as given; something of the result."""
    work.begin()
    for index in range(work.num):
        # Issued here, by the front end; only computing is pushed.
        push(partial(work.compute, work.issue()))
        pace(index)
    return sum(work.fetch())


def _contest(num: int) -> Contest:
    work = HostChain(num)
    drawn = work.issue()
    parts = {
        ISSUE: lambda: [work.issue() for _ in range(num)],
        COMPUTE: lambda: [work.compute(drawn) for _ in range(num)],
        RETURN: lambda: [work.fetch() for _ in range(num)],
    }
    waits = {
        "result after every operation": 1,
        f"wait after every {BATCH}": BATCH,
        "wait once": num,
    }
    return Contest(
        ways=(
            Way("one by one", "sequential", simply(partial(_one_by_one, work))),
            Way("concurrent.futures, wait once", "peer", partial(_pool, work)),
            *(
                Way(f"ridgeline engine, {words}", "ridgeline", partial(_engine, work, every))
                for words, every in waits.items()
            ),
        ),
        bound=Bound(
            parts=parts,
            seconds=lambda seconds: law(num, *_per_operation(num, seconds))[1],
            reason="t1 + N t2 + t3",
        ),
        explain=partial(explain, num),
    )


def law(num: int, issue_s: float, compute_s: float, return_s: float) -> tuple[float, float]:
    """Seconds of N operations one by one, and queued.

    Args:
        num: Operations, N.
        issue_s: t1, of the front end for one operation.
        compute_s: t2, of the back end.
        return_s: t3, until the result is with the caller.

    Source: N (t1 + t2 + t3) and t1 + N t2 + t3; the second with t1 and t2 exchanged where the front end
        is the slower of the two (a pipeline goes at the pace of its slowest stage).
    """
    fill_s = issue_s + compute_s - max(issue_s, compute_s)
    return num * (issue_s + compute_s + return_s), fill_s + num * max(issue_s, compute_s) + return_s


def explain(num: int, seconds: Mapping[str, float]) -> Sequence[str]:
    """The law beside what was measured."""
    one_by_one_s, queued_s = law(num, *_per_operation(num, seconds))
    # The first way is the one that queues nothing.
    first = next(iter(seconds.values()))
    queued = [value for name, value in seconds.items() if name.startswith("ridgeline")]
    lines = [
        f"N (t1 + t2 + t3) says {units.seconds(one_by_one_s)}, measured {units.seconds(first)}"
    ]
    if queued:
        measured = units.seconds(min(queued))
        lines.append(f"t1 + N t2 + t3 says {units.seconds(queued_s)}, measured {measured}")
    return lines


def _per_operation(num: int, seconds: Mapping[str, float]) -> tuple[float, float, float]:
    return seconds[ISSUE] / num, seconds[COMPUTE] / num, seconds[RETURN] / num


def _one_by_one(work: HostChain) -> float:
    work.begin()
    total = 0.0
    for _ in range(work.num):
        work.compute(work.issue())
        total = sum(work.fetch())
    return total


def _pool(work: HostChain) -> WayRunner:
    pool = ThreadPoolExecutor(1)

    def run() -> float:
        futures: list[Future[None]] = []

        def pace(index: int) -> None:
            # One thread keeps the order by itself, so that nothing is waited for before the end.
            if index == work.num - 1:
                for future in futures:
                    future.result()

        return queued(work, lambda fn: futures.append(pool.submit(fn)), pace)

    return WayRunner(run=run, close=pool.shutdown)


def _engine(work: HostChain, every: int) -> WayRunner:
    # Room for all, so that nothing but `pace` makes the front end wait.
    engine = Engine(max_pending=work.num + 1)
    state = engine.variable("state")

    def push(fn: Callable[[], None]) -> None:
        engine.push(fn, writes=(state,), lane="loader", name="compute")

    def pace(index: int) -> None:
        if (index + 1) % every == 0 or index + 1 == work.num:
            engine.wait(state)
            work.fetch()

    return WayRunner(run=lambda: queued(work, push, pace), close=engine.close)
