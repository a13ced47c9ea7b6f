"""Two workers over gloo that train by a plan with servers, and processes of their own that take part.

torchrun.py 2 taking_part_worker.py STALENESS WHO, and those that join: taking_part_worker.py STALENESS WHO
with the address in RIDGELINE_KVSTORE_JOIN. WHO is killed: `nobody`, `joined` or `founder`.
"""

import datetime
import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.plan import Plan, Sync
from ridgeline.runtime.kvstore.values import placement
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import JOIN, World
from torchrun import Later

BEFORE, STEPS, DYING = 4, 6, 3
FIRST_VALUE = 100.0
WORKERS = 2
MOST = datetime.timedelta(seconds=120)
"""How long a worker that joins may be looked for by the others."""


class Counter(nn.Module):
    """Parameters of which each step takes the same number off each element: they tell how many steps they hold."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(), (40, 3), (7,), (12, 5), (300,)]
        self.parts = nn.ParameterList([torch.full(shape, FIRST_VALUE) for shape in shapes])
        self.unused = nn.Parameter(torch.full((2,), FIRST_VALUE))

    def forward(self) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()

    def values(self) -> list[float]:
        """Different values of elements."""
        return sorted({float(v) for part in self.parts for v in part.detach().flatten()})


def made(staleness: int, servers: int) -> tuple[Counter, PlannedStep]:
    options: Any = {"kind": "dist_async", "staleness": staleness, "servers": servers}
    sync = Sync(algorithm="kvstore", options=options, bucket_bytes=(100, 400))
    model = Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = Plan(workers=WORKERS, threads=1, sync=sync)
    return model, PlannedStep(model, loss_of, optimizer, plan, device="cpu")


seen: list[list[float]] = []


def loss_of(model: Counter, batch: Tensor) -> Tensor:
    """Notes with which parameters the step is made."""
    seen.append(model.values())
    return model()


def say(told: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def job_of(store: Any) -> dist.Store:
    """Where those who take part in a store tell each other of it."""
    found: dist.Store = store._shelf._members._store
    return found


def begin(staleness: int, killed: str) -> None:
    """Train until all who joined have left."""
    model, step = made(staleness, servers=1 if killed == "founder" else 2)
    store = step.synchronizer._store
    for _ in range(BEFORE):
        step(torch.zeros(1))
    store.barrier()
    if killed == "founder" and step.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = []
    for number, dies in enumerate([True, False] if killed == "joined" else [False]):
        told.append(beside(step, dies=dies, later=number + 2, is_shared=killed != "founder"))
    state = step.optimizer_state()
    values = model.values()
    versions = {key: store.versions(key) for key in ("parts.0", "parts.1")}
    notes = step.notes
    step.close()
    if step.world.rank == 0:
        say({"joined": told, "values": values, "versions": versions, "notes": notes})
        assert state["param_groups"]


def beside(step: PlannedStep, *, dies: bool, later: int, is_shared: bool) -> Any:
    """Go on while a process takes part and leaves; what it says, and the steps made meanwhile."""
    store, process, steps = step.synchronizer._store, None, 0
    if step.world.rank == 0:
        process = Later(sys.argv[1], "joined" if dies else "nobody", **{JOIN: store.address})
    has_come, ends = False, torch.zeros(1)
    while not ends:
        step(torch.zeros(1))
        is_there = later in store.present()
        has_come |= is_there
        if is_there and not steps and store.rank == 0:
            job_of(store).set(f"seen {later}", "")
        steps += is_there
        ends.fill_(float(has_come and not is_there))
        if process is not None and process.poll() not in (None, 0, -signal.SIGKILL):
            ends.fill_(1.0)  # it has failed
        if is_shared:  # those who began make equally many steps
            dist.broadcast(ends, 0)
    if process is None:
        return None
    out, status = process.communicate()
    assert status == (-signal.SIGKILL if dies else 0), out
    return {**json.loads(out), "steps": steps}


def take_part(staleness: int, killed: str) -> None:
    """Train for some steps with those who are there, and leave them or die."""
    _, step = made(staleness, servers=2)
    for _ in range(DYING if killed == "joined" else STEPS):
        step(torch.zeros(1))
    store = step.synchronizer._store
    versions, rank = store.versions("parts.0"), store.rank
    # Its steps may be over before the others have made one.
    job_of(store).wait([f"seen {rank}"], MOST)
    say({"rank": rank, "seen": seen, "versions": versions, "notes": step.notes})
    if killed == "joined":
        os.kill(os.getpid(), signal.SIGKILL)
    step.close()


if __name__ == "__main__":
    placement.LARGE_ELEMENTS = 30  # values are divided
    words = int(sys.argv[1]), sys.argv[2]
    (take_part if JOIN in os.environ else begin)(*words)
    World.leave()
