"""One task on one network, in a process: `python -m ridgeline.experiments.networks.sides.child REQUEST`.

Whatever goes wrong here, be it a crash, costs this task and nothing else.
"""

import os
import sys
import time
import traceback
from pathlib import Path

import msgspec
import torch

from ridgeline.codec import write_atomically
from ridgeline.experiments.networks.catalog import catalog
from ridgeline.experiments.networks.request import NetworkAnswer, NetworkRequest
from ridgeline.experiments.networks.sides.check import check
from ridgeline.experiments.networks.sides.contest import choose_plan, contest, first_step
from ridgeline.experiments.networks.sides.forms import NetworkSubject
from ridgeline.probe.measure import measure
from ridgeline.workers.worker_process import end_well, end_with_parent
from ridgeline.workers.world import World

RUN = {
    "compile": first_step,
    "compile again": first_step,
    "plan": choose_plan,
    "contest": contest,
    "check": check,
}
RECOMPILE_LIMIT = 64
"""Programs of one function before the compiler gives up: several forms of a network share its functions."""


def main() -> None:
    """Do what the file named by the last argument asks for."""
    # The experiment may be killed, while a compiler has minutes to go.
    end_with_parent(os.getppid())
    request = msgspec.json.decode(Path(sys.argv[-1]).read_bytes(), type=NetworkRequest)
    try:
        perform(request)
    except Exception:  # noqa: BLE001 - the parent reads the log; teardown after a failure may hang
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    end_well()


def perform(request: NetworkRequest) -> None:
    """Do one task; rank 0 writes the answer whenever more is known."""
    # The name is that of torch 2.11 to 2.13.
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT  # noqa: SLF001 - there is no public name
    how = request.how
    world = World.join(device=how.device)
    if request.task == "machine":
        begin = time.perf_counter()
        measure(settings=(world.setting,))
        answer = NetworkAnswer(first_s=time.perf_counter() - begin)
        write_atomically(Path(request.answer), msgspec.json.encode(answer))
        return
    # The check is in float32, so that the precision is no part of what differs.
    precision = "bf16" if "bf16" in how.allow and request.task != "check" else "as-is"
    subject = NetworkSubject(
        network=catalog(how.sources)[request.network],
        world=world,
        scale=how.scale,
        precision=precision,
    )

    def write(answer: NetworkAnswer) -> None:
        if world.rank == 0:
            write_atomically(Path(request.answer), msgspec.json.encode(answer))

    RUN[request.task](request, subject, write)
    World.leave()


if __name__ == "__main__":
    main()
