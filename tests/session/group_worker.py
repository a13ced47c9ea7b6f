"""Worker script: three workers in two groups choose plans at the same time; one of them trains alone."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import ridgeline as rl


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(**where: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with rl.TrainStep(model, loss_fn, optimizer, device="cpu", **where) as step:
        generator = torch.Generator().manual_seed(step.world.rank)
        losses = []
        for _ in range(6):
            x = torch.randn(32, 16, generator=generator)
            losses.append(float(step((x, torch.randint(0, 4, (32,), generator=generator)))))
        total = torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum()
        machine = step.machine
        assert machine is not None
        return {
            "losses": losses,
            "parameters": float(total),
            "plan": repr(step.plan),
            "workers": step.plan.workers,
            "measured": [entry.setting.workers for entry in machine.collectives],
            "predicted_ns": step.predicted().step_ns,
        }


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    alone = dist.new_group([0])
    pair = DeviceMesh("cpu", [1, 2])
    told = trained(mesh=pair) if rank else trained(process_group=alone)
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
