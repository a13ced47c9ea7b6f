"""Worker script: trains until its host is cut off, and writes what it is told then.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python cut_off.py DIRECTORY

Started by hand, since a launcher would end the worker. After three steps it prints `ready` and waits for a line; once it
has been told, it prints `told` and stays until another comes.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ridgeline as rl
from ridgeline.errors import AbsentWorkerError

TIMEOUT = timedelta(seconds=4)
"""Of collectives, once a host is cut off: how long the workers wait for each other in vain."""
STEPS_BEFORE, STEPS_AFTER = 3, 3


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 16), torch.randint(0, 4, (8,))


def main() -> None:
    rank, directory = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    step = rl.TrainStep(
        model,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.SGD(model.parameters(), 0.1),
        rl.Plan(workers=2),
        device="cpu",
    )
    for _ in range(STEPS_BEFORE):
        step(batch())
    print("ready", flush=True)  # noqa: T201 - to the test
    sys.stdin.readline()
    dist.distributed_c10d._set_pg_timeout(TIMEOUT, dist.group.WORLD)
    told = ""
    try:
        for _ in range(STEPS_AFTER):
            step(batch())
    except AbsentWorkerError as error:
        told = str(error)
    (directory / f"{rank}.json").write_text(json.dumps(told))
    print("told", flush=True)  # noqa: T201
    sys.stdin.readline()
    # The ordinary exit would wait for the store, which one of the two can no longer reach.
    os._exit(0)


if __name__ == "__main__":
    main()
