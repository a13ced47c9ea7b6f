"""Worker script: a user's own script with an automatic plan; runs alone and under torchrun."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ridgeline as rl


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = rl.TrainStep(model, loss_fn, optimizer, device="cpu", name="mine")
    generator = torch.Generator().manual_seed(step.world.rank)
    loader = [
        {
            "x": torch.randn(32, 16, generator=generator),
            "y": torch.randint(0, 4, (32,), generator=generator),
        }
        for _ in range(12)
    ]
    losses = [float(step(batch)) for batch in rl.feed(loader, step.device)]
    verdict = step.verdict()
    total = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()
    result = {
        "losses": losses,
        "parameters": float(total),
        "plan": repr(step.plan),
        "reasons": [choice.knob for choice in step.plan.choices],
        "predicted_ns": verdict.predicted_ns,
        "measured_ns": verdict.measured_ns,
    }
    (Path(sys.argv[1]) / f"{step.world.rank}.json").write_text(json.dumps(result))
    step.close()


if __name__ == "__main__":
    main()
