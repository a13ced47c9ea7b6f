"""Target of `run_in_group`: a case whose ways differ between two workers."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import torch.distributed as dist

from ridgeline.experiments import turns
from ridgeline.experiments.ways import contest
from ridgeline.experiments.ways.case import Case, Contest, Way, WayRunner
from ridgeline.probe.groups.peers import Peers
from ridgeline.recording import turns as blocks

SLOW_S = 2.0**-6
"""All times are powers of two, whose sums and means are exact."""


class Clock:
    """Stands for the host's clock: it goes on by what runs are said to take."""

    def __init__(self) -> None:
        self.now_s = 0.0
        stand_in: Any = SimpleNamespace(perf_counter=lambda: self.now_s)
        contest.time = blocks.time = turns.time = stand_in

    def takes(self, seconds: float, result: float = 1.0) -> float:
        self.now_s += seconds
        return result


def held(request: bytes) -> bytes:
    """The case, as each worker has seen it."""
    clock = Clock()
    peers = Peers.of(dist.group.WORLD)
    runs = {"same": 0, "slow on 1": 0}

    def count(name: str, seconds: float) -> float:
        runs[name] += 1
        return clock.takes(seconds)

    late_runs = []

    def late() -> float:
        late_runs.append(1)
        if peers.rank == 1 and len(late_runs) > 2:
            raise ValueError("no more")
        return clock.takes(SLOW_S / 16)

    def unmade() -> WayRunner:
        if peers.rank == 0:
            raise ValueError("not here")
        return WayRunner(run=lambda: 1.0)

    # Of the runs in a turn each worker has an idea of its own.
    same_s, slow_s = SLOW_S / (4 + 4 * peers.rank), SLOW_S * (0.25 + 0.75 * peers.rank)
    ways = (
        Way("same", "peer", lambda: WayRunner(run=partial(count, "same", same_s))),
        Way("slow on 1", "peer", lambda: WayRunner(run=partial(count, "slow on 1", slow_s))),
        Way(
            "other on 1",
            "peer",
            partial(WayRunner, run=partial(clock.takes, SLOW_S / 16, 1.0 + peers.rank)),
        ),
        Way("late on 1", "peer", lambda: WayRunner(run=late)),
        Way("not on 0", "peer", unmade),
    )
    case = Case(name="case", title="", prepare=lambda: Contest(ways=ways))
    found = contest.hold(case, limit_s=1.0, progress=lambda line: None, peers=peers)
    mine = msgspec.json.encode((found, runs))
    replies: list[bytes] = [b""] * peers.size
    dist.all_gather_object(replies, mine)
    return b"[" + b",".join(replies) + b"]"
