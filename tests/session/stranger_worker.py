"""Worker script: steps that not every plan bears, under torchrun; writes what became of them."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.planner.trials import trials

DIRECTORY = Path(sys.argv[1])


class Viewing(nn.Module):
    """Views what a convolution gave, which no other memory format allows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).view(len(x), -1))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def writing(model: nn.Module, batch: Any) -> Tensor:
    """A loss that the first worker logs."""
    loss = loss_fn(model, batch)
    if torch.distributed.get_rank() == 0:
        with (DIRECTORY / "log").open("a") as log:
            log.write("x")
    return loss


def trained(loss: Any, plan: Any, machine: rl.Machine | None = None) -> dict[str, Any]:
    """Five steps under a plan: losses, notes, and what became of plans in another memory format."""
    torch.manual_seed(0)
    model = Viewing()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rl.TrainStep(
        model, loss, optimizer, plan, machine=machine, device="cpu", progress=print
    ) as step:
        generator = torch.Generator().manual_seed(step.world.rank)
        losses = [float(step(torch.randn(8, 3, 8, 8, generator=generator))) for _ in range(5)]
        candidates = step.ranking.candidates if step.ranking else ()
        failures = [c.failure for c in candidates if c.plan.memory_format != "as-is" and c.failure]
        return {"losses": losses, "notes": step.notes, "failures": failures}


def main() -> None:
    torch.set_num_threads(1)
    # Whether the other memory format could win would rest on this machine's rates and what else it does.
    trials.could_win = lambda *_, **__: True
    by_hand = trained(loss_fn, rl.Plan(workers=2))
    machine = rl.Machine.load(DIRECTORY / "machine.json")
    result = {
        "by hand": by_hand,
        "viewing": trained(loss_fn, "auto", machine),
        "writing": trained(writing, "auto", machine),
    }
    rank = torch.distributed.get_rank()
    (DIRECTORY / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
