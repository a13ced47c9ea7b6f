"""Two workers whose compiled step is wrong on one of them only; run by torchrun.

check_worker.py OUTPUT   writes each worker's error to OUTPUT.RANK
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.errors import EquivalenceError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()


def main() -> None:
    world = World.join(threads=1)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = PlannedStep(model, loss_fn, optimizer, Plan(execution="compiled", workers=world.size))
    # A loss that is off by a constant has the right gradients: no other worker can see it.
    offset = float(world.rank)
    step._body.form._compiled = lambda model, batch: loss_fn(model, batch) + offset  # type: ignore[attr-defined]
    try:
        step((torch.randn(8, 4),))
    except EquivalenceError as error:
        Path(f"{sys.argv[1]}.{world.rank}").write_text(str(error))
    step.close()
    World.leave()


if __name__ == "__main__":
    main()
