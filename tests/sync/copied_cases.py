"""Worker script: copies of an optimizer in a step of two workers, and steps that it takes alone.

torchrun --nproc-per-node 2 copied_cases.py OUTPUT
"""

import copy
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import ridgeline as rl
from ridgeline.errors import WorkloadError
from ridgeline.workers.agree import share_bytes
from ridgeline.workers.world import World

ALGORITHMS = ("all_reduce", "sharded", "kvstore")
COPIES: dict[str, Callable[[Optimizer], Optimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}


def told(optimizer: Optimizer) -> dict[str, str]:
    """Of each way of copying, what it says, or how many parameters the copy remembers something of."""
    said = {}
    for name, take in COPIES.items():
        try:
            taken = take(optimizer)
        except WorkloadError as error:
            said[name] = str(error)
        else:
            said[name] = str(sum(p in taken.state for p in taken.param_groups[0]["params"]))
    return said


def stepped(optimizer: Optimizer) -> str:
    """What it says of a step that the script has it take."""
    try:
        optimizer.step()
    except WorkloadError as error:
        return str(error)
    return ""


def cases(algorithm: str, world: World) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    plan = rl.Plan(workers=2, threads=1, sync=rl.Sync(algorithm=algorithm))
    with rl.TrainStep(
        model, lambda m, b: m(b).square().mean(), optimizer, plan, device="cpu"
    ) as step:
        found = {"before": told(optimizer)}
        step(torch.ones(4, 3))
        found["live"] = told(optimizer)
        alone = stepped(optimizer)
        state = pickle.loads(share_bytes(pickle.dumps(step.optimizer_state()), world))
    found["closed"] = told(optimizer)
    optimizer.load_state_dict(state)
    found["loaded"] = told(optimizer)
    return {"copies": found, "alone": alone}


def main() -> None:
    world = World.join(threads=1, device="cpu")
    found = {algorithm: cases(algorithm, world) for algorithm in ALGORITHMS}
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    World.leave()


if __name__ == "__main__":
    main()
