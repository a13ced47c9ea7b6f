"""Target of `run_in_group`: a case whose ways differ between two workers."""

import time
from functools import partial

import msgspec
import torch.distributed as dist

from ridgeline.experiments.ways.case import Case, Contest, Runner, Way
from ridgeline.experiments.ways.contest import hold
from ridgeline.probe.peers import Peers

PAUSE_S = 0.02


def held(request: bytes) -> bytes:
    """The case, as each worker has seen it."""
    peers = Peers.of(dist.group.WORLD)
    runs = {"same": 0, "slow on 1": 0}

    def count(name: str, pause_s: float) -> float:
        runs[name] += 1
        time.sleep(pause_s)
        return 1.0

    late_runs = []

    def late() -> float:
        late_runs.append(1)
        if peers.rank == 1 and len(late_runs) > 2:
            raise ValueError("no more")
        return 1.0

    def unmade() -> Runner:
        if peers.rank == 0:
            raise ValueError("not here")
        return Runner(run=lambda: 1.0)

    # Of the runs in a turn each worker has an idea of its own.
    same_s, slow_s = PAUSE_S / (5 + 5 * peers.rank), PAUSE_S * peers.rank
    ways = (
        Way("same", "peer", lambda: Runner(run=partial(count, "same", same_s))),
        Way("slow on 1", "peer", lambda: Runner(run=partial(count, "slow on 1", slow_s))),
        Way("other on 1", "peer", lambda: Runner(run=lambda: 1.0 + peers.rank)),
        Way("late on 1", "peer", lambda: Runner(run=late)),
        Way("not on 0", "peer", unmade),
    )
    case = Case(name="case", title="", prepare=lambda: Contest(ways=ways))
    found = hold(case, limit_s=1.0, progress=lambda line: None, peers=peers)
    mine = msgspec.json.encode((found, runs))
    replies: list[bytes] = [b""] * peers.size
    dist.all_gather_object(replies, mine)
    return b"[" + b",".join(replies) + b"]"
