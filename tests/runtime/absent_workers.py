"""Worker script: rank 1 stops coming, in each way; rank 0 writes what it is told.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python absent_workers.py OUTPUT

Started by hand, since a launcher would end the other worker. Every case has a process group of its own, and a
process forked from the worker; the last one, which kills it, comes behind them.
"""

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.errors import AbsentWorkerError, EngineError, KVStoreError
from ridgeline.runtime.kvstore.serving.joining import gathering

TIMEOUT = timedelta(seconds=15)
"""Of collectives: what all cases last, which wait for its end at once, but the last one."""
PATIENCE = timedelta(seconds=90)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 16), torch.randint(0, 4, (8,))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make(loss: Callable[[nn.Module, Any], Tensor] = loss_fn, **settings: Any) -> rl.TrainStep:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"plan": rl.Plan(workers=2), "device": "cpu", **settings}
    return rl.TrainStep(model, loss, optimizer, **settings)


def ends_early(rank: int, wait: Callable[[], None]) -> None:
    """One loop is shorter, and the worker does something else then; several exchanges fail."""
    with make(plan=rl.Plan(workers=2, sync=rl.Sync(bucket_bytes=(256,)))) as step:
        for _ in range(3 if rank else 5):
            step(batch())
        wait()


def ends_a_round_early(rank: int, wait: Callable[[], None]) -> None:
    """Workers that exchange parameters every second step miss each other in the next exchange."""
    with make(plan=rl.Plan(workers=2, sync=rl.Sync(every=2))) as step:
        for _ in range(4 if rank else 7):
            step(batch())
        wait()


def misses_what_travels(rank: int, wait: Callable[[], None]) -> None:
    """An exchange that began in the last step is on its way when the step is closed."""
    sync = rl.Sync(every=2, compression="int8", options={"delay": 1})
    step = make(plan=rl.Plan(workers=2, sync=sync))
    for _ in range(3 if rank else 4):
        step(batch())
    wait() if rank else step.close()


def closes_early(rank: int, wait: Callable[[], None]) -> None:
    """Where a step is several micro-batches."""
    with make(plan=rl.Plan(workers=2, accumulate=2)) as step:
        for _ in range(3 if rank else 5):
            step(batch())
    wait()


def losing(rank: int) -> Callable[[nn.Module, Any], Tensor]:
    """A loss that raises on rank 1, in its third step."""
    calls = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if rank and len(calls) == 3:
            raise ValueError("boom")
        return loss_fn(model, batch)

    return loss


def raises(rank: int, wait: Callable[[], None]) -> None:
    """Its loss raises, and its loop ends."""
    step = make(losing(rank))
    with contextlib.suppress(ValueError):
        for _ in range(5):
            step(batch())
    wait()


def skips(rank: int, wait: Callable[[], None]) -> None:
    """Its loss raises in a step, which it leaves out: what it sends is of a step behind."""
    step = make(losing(rank), plan=rl.Plan(workers=2, sync=rl.Sync(bucket_bytes=(256,))))
    for _ in range(5):
        with contextlib.suppress(ValueError):
            step(batch())
    wait()


def saves_alone(rank: int, wait: Callable[[], None]) -> None:
    """The first worker asks for the state of parts that all have, while the other is in its next step."""
    with make(plan=rl.Plan(workers=2, sync=rl.Sync(algorithm="sharded"))) as step:
        for _ in range(3):
            step(batch())
        with contextlib.suppress(AbsentWorkerError if rank else ()):
            step(batch()) if rank else step.optimizer_state()
        wait()


def reports_alone(rank: int, wait: Callable[[], None]) -> None:
    """What the plan was predicted to take is measured and traced by all workers, and asked for by one."""
    with make() as step:
        for _ in range(3):
            step(batch())
        wait() if rank else step.verdict()


def makes_one_alone(rank: int, wait: Callable[[], None]) -> None:
    """A second step, while the other is in the next of the first."""
    with make() as step, contextlib.suppress(AbsentWorkerError if rank else ()):
        step(batch())
        step(batch()) if rank else make()
    wait() if rank else None


def hangs(rank: int, wait: Callable[[], None]) -> None:
    """In the forward pass of the third step."""
    calls = []

    def losing(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        if rank and len(calls) == 3:
            wait()
        return loss_fn(model, batch)

    step = make(losing)
    with contextlib.suppress(AbsentWorkerError if rank else ()):
        for _ in range(5):
            step(batch())


def two_steps(rank: int, wait: Callable[[], None]) -> None:
    """A generator and a discriminator."""
    first, second = make(name="generator"), make(name="discriminator")
    for number in range(5):
        if rank and number == 3:
            wait()
            break
        first(batch())
        second(batch())


def chooses_alone(rank: int, wait: Callable[[], None]) -> None:
    """It never calls the step whose plan is chosen."""
    step = make(plan="auto", seconds=20.0, progress=lambda line: None)
    wait() if rank else step(batch())


def one_chooses(rank: int, wait: Callable[[], None]) -> None:
    """The other has a plan, and both begin with an exchange."""
    settings = {"plan": "auto", "seconds": 20.0, "progress": lambda line: None} if rank else {}
    with contextlib.suppress(AbsentWorkerError if rank else ()):
        make(**settings)(batch())


class WithoutServer:
    """Stands for a server that has started."""

    address = "tcp://127.0.0.1:1"

    def close(self) -> None: ...


def starts_a_server_late(rank: int, wait: Callable[[], None]) -> None:
    """Its server takes longer than the time-out."""

    def starting(*_: Any) -> WithoutServer:
        if rank:
            wait()
            raise KVStoreError("given up")
        return WithoutServer()

    sync = rl.Sync(algorithm="kvstore", options={"kind": "dist_async"})
    with (
        mock.patch.object(gathering, "ServerBeside", starting),
        contextlib.suppress(KVStoreError),
    ):
        make(plan=rl.Plan(workers=2, sync=sync))


def trains_alone(rank: int, wait: Callable[[], None]) -> None:
    wait() if rank else make()


def pushes_less(rank: int, wait: Callable[[], None]) -> None:
    """To a synchronous store, which has a group of its own."""
    store = rl.kvstore.create("dist_sync")
    store.init("w", torch.zeros(2))
    for _ in range(2 if rank else 3):
        store.push("w", torch.ones(2))
    try:
        store.pull("w").get()
    except EngineError as error:
        raise error.__cause__ or error from None
    wait()


def is_killed(rank: int, wait: Callable[[], None]) -> None:
    """In its third step; the last case."""
    with make() as step:
        for number in range(5):
            if rank and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            step(batch())


CASES = (
    ends_early,
    ends_a_round_early,
    misses_what_travels,
    closes_early,
    raises,
    skips,
    saves_alone,
    reports_alone,
    makes_one_alone,
    hangs,
    two_steps,
    chooses_alone,
    one_chooses,
    starts_a_server_late,
    trains_alone,
    pushes_less,
    is_killed,
)


def hold(case: Callable[..., None], rank: int, store: dist.Store) -> dict[str, str]:
    """What this worker was told, by the name of the case; nothing where it was told nothing."""
    told, name = {}, case.__name__
    # Its time-out is not for one that is still elsewhere.
    store.set(f"begins/{name}/{rank}", "1")
    store.wait([f"begins/{name}/{other}" for other in range(2)], PATIENCE)
    own = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=2, timeout=TIMEOUT)
    try:
        case(rank, functools.partial(store.wait, [f"told/{name}"], PATIENCE))
    except AbsentWorkerError as error:
        told[name] = str(error)
    store.set(f"told/{name}", "1") if rank == 0 else None
    dist.destroy_process_group()
    return told


def main() -> None:
    rank, output = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    parts = {case: output.with_name(f"{rank}.{case.__name__}.json") for case in CASES[:-1]}
    children = []
    for case, path in parts.items():  # before there is a thread that would not come along
        child = os.fork()
        if not child:
            store = dist.TCPStore(address, port, is_master=False, timeout=PATIENCE)
            path.write_text(json.dumps(hold(case, rank, store)))
            os._exit(0)  # the end of an interpreter costs as much as all of the case
        children.append(child)
    store = dist.TCPStore(
        address, port, is_master=rank == 0, wait_for_workers=False, timeout=PATIENCE
    )
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
    store.set(f"there/{rank}", "1")
    store.wait(["there/0", "there/1"], PATIENCE)
    told = hold(CASES[-1], rank, store)
    for path in parts.values():
        told |= json.loads(path.read_text())
    output.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
