"""A worker process of a group (`group`): joins the others, and calls one function when it is asked to.

Meanwhile it calls `warm_up(device)` of the function's module, where there is one.

A worker whose parent dies ends itself: its standard input is a pipe that the parent never writes to, and end
of file there means that the parent is gone.
"""

import importlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec

from ridgeline.errors import LaunchError
from ridgeline.probe.groups.worker_error import Raised
from ridgeline.workers.host_threads import set_threads

CALL, REPLY = "call", "reply"
"""Files in the directory of a group."""
WAITING_S = 300.0
"""A collective of a group without a deadline waits no longer than this for the other workers."""
_POLL_S = 0.01


class WorkerRequest(NamedTuple):
    """What a worker is asked: the request as it is, and variables for the environment."""

    request: bytes
    environment: dict[str, str]


def _follow_parent() -> None:
    """End this worker at once when the parent is gone."""

    def watch() -> None:
        # A read that ends tells of a parent that was killed, too, which no handler could.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="ridgeline-lifeline", daemon=True).start()


def _called(directory: Path) -> WorkerRequest:
    """The call, once it is there."""
    path = directory / CALL
    while not path.exists():
        time.sleep(_POLL_S)
    return msgspec.json.decode(path.read_bytes(), type=WorkerRequest)


def _work(directory: Path, target: str, device: str, first_gpu: int) -> None:
    """Join the group, call the target, and write the reply if this is rank 0."""
    import torch
    import torch.distributed as dist

    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    if threads:
        set_threads(threads)
    deadline_s = float(os.environ["RIDGELINE_GROUP_DEADLINE_S"])
    place = None
    if device == "cuda":
        if first_gpu + rank >= torch.cuda.device_count():
            raise LaunchError(
                f"wanted one GPU per worker, got {torch.cuda.device_count()} GPUs for rank {rank}; "
                f"start at most {torch.cuda.device_count()} workers on this host"
            )
        place = torch.device("cuda", first_gpu + rank)
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        # A file needs no free port, so groups started at the same time cannot collide.
        store=dist.FileStore(str(directory / "store"), workers),
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=deadline_s if math.isfinite(deadline_s) else WAITING_S),
        device_id=place,
    )
    name, _, attribute = target.partition(":")
    module = importlib.import_module(name)
    function: Callable[[bytes], bytes] = getattr(module, attribute)
    warm_up: Callable[[str], object] | None = getattr(module, "warm_up", None)
    if warm_up is not None:
        # While the parent is still busy: the call may come much later than the start.
        warm_up(device)
    call = _called(directory)
    os.environ.update(call.environment)
    reply = function(call.request)
    if rank == 0:
        (directory / REPLY).write_bytes(reply)
    dist.destroy_process_group()


def main(arguments: list[str]) -> None:
    """Entry of a worker process: directory, target, device and the GPU of rank 0."""
    _follow_parent()
    directory, target, device = Path(arguments[0]), arguments[1], arguments[2]
    is_done = False
    try:
        _work(directory, target, device, int(arguments[3]))
        is_done = True
    finally:
        if not is_done:  # note when, so that the parent can tell who failed first
            error = sys.exception()
            raised = Raised(time.monotonic_ns(), type(error).__name__, str(error))
            raised.save(directory, int(os.environ["RANK"]))
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # The ordinary exit would wait for collectives that a dead peer never joins; and after success
        # it was once seen to abort ("terminate called without an active exception"), most likely over a
        # thread of torch that was still ending. Everything of value is in files by now.
        os._exit(0 if is_done else 1)


if __name__ == "__main__":
    main(sys.argv[1:])
