"""Case `queue` on a GPU: kernels are queued by launching them, and the device is the back end."""

from collections.abc import Mapping
from functools import partial

import torch

from ridgeline import units
from ridgeline.engine import Engine
from ridgeline.experiments.asynchronous.host_queue import COMPUTE, ISSUE, RETURN, explain, law
from ridgeline.experiments.contests import wall_s
from ridgeline.experiments.ways.case import Bound, Case, Contest, Way, WayRunner, simply
from ridgeline.probe.timing import synchronize, time_block
from ridgeline.recording.turns import call_s

OPERATIONS = {True: 2000, False: 10000}
"""Quick or not to the operations of a run; 10000 are the seeds'."""
BATCH = 50
"""Operations of a mini-batch."""
SIDE = 1024


def device_queue_case(*, quick: bool) -> Case:
    """N operations of two kernels, each on what the one before it left."""
    num = OPERATIONS[quick]
    return Case(
        name="queue",
        title=f"{num} operations (product and tanh, {SIDE} x {SIDE}, float32) on the GPU",
        prepare=partial(_contest, num),
        units=num,
        unit="operation",
        calls=1,
    )


class DeviceChain:
    """A chain of operations on the device: `issue` enqueues one, `fetch` waits and reads."""

    def __init__(self, num: int, device: str) -> None:
        self.num = num
        self.device = device
        generator = torch.Generator().manual_seed(0)
        # Scaled, so that thousands of products neither grow nor vanish.
        self._weight = (torch.randn(SIDE, SIDE, generator=generator) / SIDE**0.5).to(device)
        self._initial = torch.randn(SIDE, SIDE, generator=generator).to(device)
        self._state = self._initial.clone()

    def begin(self) -> None:
        """The state from the start."""
        self._state.copy_(self._initial)

    def issue(self) -> None:
        """Two kernels."""
        torch.tanh(self._state @ self._weight, out=self._state)

    def issue_batch(self) -> None:
        """The kernels of a mini-batch."""
        for _ in range(BATCH):
            self.issue()

    def fetch(self) -> float:
        """One number of the result on the host, which waits for it."""
        return float(self._state[0, 0])


def _contest(num: int, device: str = "cuda") -> Contest:
    work = DeviceChain(num, device)
    # On an idle device launching does not wait for a full queue: so few are timed, and scaled.
    few = min(num, 200)

    def issue() -> float:
        synchronize()
        return call_s(work.issue, few)

    # The least, since what disturbs only adds.
    issue_s = min(issue() for _ in range(5))
    compute_s = min(time_block(work.issue, few) for _ in range(5))
    return_s = min(wall_s(work.fetch) for _ in range(20))
    parts = {ISSUE: issue_s * num, COMPUTE: compute_s * num, RETURN: return_s * num}

    def explained(seconds: Mapping[str, float]) -> list[str]:
        times = (f"{name.partition(':')[0]} {units.seconds(s / num)}" for name, s in parts.items())
        return [", ".join(times), *explain(num, dict(seconds) | parts)]

    return Contest(
        ways=(
            Way("result after every operation", "sequential", simply(partial(_paced, work, 1))),
            Way(f"torch, synchronised every {BATCH}", "peer", simply(partial(_paced, work, BATCH))),
            Way("torch, synchronised once", "peer", simply(partial(_paced, work, num))),
            Way(f"ridgeline engine, {BATCH} in a task", "ridgeline", partial(_engine, work)),
        ),
        bound=Bound(
            parts={},
            seconds=lambda seconds: law(num, issue_s, compute_s, return_s)[1],
            reason="t1 + N t2 + t3",
        ),
        explain=explained,
    )


def _paced(work: DeviceChain, every: int) -> float:
    work.begin()
    for index in range(work.num):
        work.issue()
        if index % every == every - 1:
            work.fetch()
    return work.fetch()


def _engine(work: DeviceChain) -> WayRunner:
    engine, lane = Engine(), "compute"
    if work.device == "cuda":
        from ridgeline.engine.lanes.streams import device_lanes

        index = torch.cuda.current_device()
        engine = Engine(lanes=device_lanes(torch.device("cuda", index)))
        # Lanes of a device are named by its index.
        lane = f"compute:{index}"
    state = engine.variable("state")

    def run() -> float:
        engine.push(work.begin, writes=(state,), lane=lane, name="begin")
        for _ in range(-(-work.num // BATCH)):
            engine.push(work.issue_batch, writes=(state,), lane=lane, name="mini-batch")
            engine.end_batch()
        engine.wait(state)
        return work.fetch()

    return WayRunner(run=run, close=engine.close)
