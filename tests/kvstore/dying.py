"""A server and a worker as processes that kill themselves at a message of some type."""

import faulthandler
import os
import signal
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ridgeline.runtime.kvstore.serving import segment, wire
from ridgeline.runtime.kvstore.serving.server.server import Server
from ridgeline.runtime.kvstore.serving.server.shard import Shard
from ridgeline.runtime.kvstore.serving.server.snapshots import Snapshots
from ridgeline.runtime.kvstore.serving.worker import channel, connections
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.updaters import (
    FunctionUpdater,
    OptimizerUpdater,
    SetOptimizer,
    register_updater,
)

TYPES = tuple(one.__name__ for one in wire.Body.__args__)
LEASE_S = 2.0
SIZE = int(os.environ.get("RIDGELINE_KILLS_ELEMENTS", "6000"))
"""Elements of the largest value, which go through shared memory: in slices, where these are several."""


# What torch imports with the first step of an optimizer takes seconds: processes are made from one that has.
OptimizerUpdater(SetOptimizer("sgd", 1.0, {}))("", torch.zeros(1), torch.zeros(1))


def add(key: Any, total: torch.Tensor, value: torch.Tensor) -> None:
    """What the optimizer of `steps` does, as a function."""
    value.add_(total)


register_updater("add to a value", add)


class Death(NamedTuple):
    """When a process ends: at the so many-th message of a type, before or after it has done what that asks."""

    kind: str
    count: int
    is_after: bool


def be_quick() -> None:
    """Have connections of this process send again soon."""
    connections.Connection = partial(channel.Connection, resend_s=0.2)  # type: ignore[assignment,misc]


def share_in(folder: str) -> None:
    """Have this process share memory by files of a folder, so that what the killed leave is told from others'."""
    segment.SHARED_FILES = Path(folder)


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def serve(folder: str, num_workers: int, death: Death | None, told: Connection) -> None:
    """Serve until killed, or until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    share_in(str(Path(folder, "memory")))
    shard = Shard(num_workers, None)
    snapshots = Snapshots(Path(folder), shard, every_bytes=2000, every_s=0.05)
    server = Server(shard, "tcp://127.0.0.1:*", LEASE_S, snapshots=snapshots)
    if death is not None:
        shard.handle = _dying(shard.handle, death)  # type: ignore[method-assign]
    told.send((server.epoch, server.address))
    server.serve(lambda: told.poll() and not server.is_used)
    server.close()


def _dying(handle: Any, death: Death) -> Any:
    left = death.count

    def dying(call: wire.Call, frames: list[memoryview]) -> Any:
        nonlocal left
        is_it = type(call.body).__name__ == death.kind
        left -= is_it
        if is_it and not left and not death.is_after:
            kill_myself()
        replies = handle(call, frames)
        if is_it and not left:
            kill_myself()
        return replies

    return dying


def work(rank: int, address: str, memory: str, death: Death, says: Connection) -> None:
    """Push and pull as `steps` does, until killed; says how many pushes were answered, after each."""
    torch.set_num_threads(1)
    share_in(memory)
    be_quick()
    send, left = channel.Connection._send, death.count

    def dying(self: channel.Connection, number: int, asked: channel.Asked) -> None:
        nonlocal left
        is_it = type(asked.body).__name__ == death.kind
        left -= is_it
        if is_it and not left and not death.is_after:
            kill_myself()
        send(self, number, asked)
        if is_it and not left:
            kill_myself()

    if death.kind in ("Again", "Whole"):  # said once, after the server has answered something else
        channel.Connection._send = dying  # type: ignore[method-assign]
    shelf = RemoteShelf([address], rank, 2, lease_s=LEASE_S)
    # Who has not been heard of is waited for as long as those who are still to come.
    shelf._servers.tell_all(wire.Cover())
    channel.Connection._send = dying  # type: ignore[method-assign]
    steps(shelf, says, has_function=death.kind == "SetUpdater")
    if death.kind == "Beat":
        says.poll(None)
    shelf.close()


def steps(shelf: RemoteShelf, says: Any, *, has_function: bool) -> None:
    """Each worker pushes ones to rows and ones to numbers, with all that a store does in between.

    Args:
        shelf: Of the worker.
        says: Is sent how many pushes were answered, and at the end that all have come there.
        has_function: A function works them in, else an optimizer.
    """
    rank = shelf.rank
    if has_function:  # which takes whole values
        shelf.set_updater(FunctionUpdater("add to a value"))
    shelf.init({"w": torch.zeros(SIZE), "e": torch.zeros(4, 3), "n": torch.zeros(())})
    if not has_function:
        shelf.set_updater(OptimizerUpdater(SetOptimizer("sgd", -1.0, {"lr": 1.0})))
    # What a worker says that comes later; of one that was there it changes nothing.
    shelf._servers.tell_all(wire.Join())
    shelf._enter(["w", "e", "n"])
    shelf.barrier()
    out, rows = torch.empty(SIZE), torch.empty(1, 3)
    for step in range(6):
        shelf.push({"w": torch.full((SIZE,), rank + 1.0)})
        says.send(("w", step + 1))
        shelf.push(
            {
                "e": torch.sparse_coo_tensor(
                    [[rank]], torch.ones(1, 3), (4, 3), check_invariants=True
                )
            }
        )
        says.send(("e", step + 1))
        shelf.push_and_read("n", torch.tensor(1.0), [torch.empty(())])
        says.send(("n", step + 1))
        shelf.read("w", [out], None)
        for part in shelf._parts["w"]:  # each of which may hold other pushes of the other worker
            least, most = out[part.start : part.stop].aminmax()
            assert least == most >= (rank + 1) * (step + 1)
        shelf.read("e", [rows], torch.tensor([rank]))
        assert rows[0, 0] == step + 1
        if step == 3 and not has_function:
            shelf.load_optimizer_states(shelf.optimizer_states())
        if step == 3:
            shelf._servers.tell_all(wire.Cover())
    shelf.barrier()
    says.send(("barrier", 2))
