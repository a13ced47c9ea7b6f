"""Worker script: workers that may train alone, by a profile of a link that is slow; writes what was chosen."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ridgeline as rl

STEPS = 120


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 16, generator=generator) for _ in range(STEPS)]


def chosen(machine: rl.Machine, allow: tuple[str, ...]) -> dict[str, Any]:
    """What a step with an automatic plan does by a profile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with rl.TrainStep(
        model,
        loss_fn,
        optimizer,
        machine=machine,
        device="cpu",
        allow=allow,
        progress=lambda line: None,
    ) as step:
        before = [p.detach().clone() for p in model.parameters()]
        plan = step.prepare(batches(step.world.rank)[0])
        undone = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        sums = []
        for batch in batches(step.world.rank):
            step(batch)
            flat = torch.cat([p.detach().flatten() for p in model.parameters()])
            sums.append(float(flat.double().sum()))
        assert step.ranking is not None
        measured = step.ranking.best.measured
        return {
            "plan": repr(plan),
            "every": plan.sync.every,
            "options": dict(plan.sync.options),
            "notes": list(step.ranking.notes),
            "periods": None if measured is None else measured.counters.get("whole_periods"),
            "undone": undone,
            "sums": sums,
        }


def main() -> None:
    machine = rl.Machine.load(Path(sys.argv[1]) / "machine.json")
    found = {
        "allowed": chosen(machine, ("local-steps",)),
        "not allowed": chosen(machine, ("compression",)),
    }
    rank = torch.distributed.get_rank()
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
