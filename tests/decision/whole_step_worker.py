"""Two workers that time a step of each alone, at once, by clocks that the steps move; writes what each saw.

Run by torchrun. How many steps there are follows from how long they take, and one of them is to fail.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ridgeline.decision import whole_step
from ridgeline.decision.trial import Script, taken_back
from ridgeline.decision.whole_step import OtherFailedError, phase_seconds
from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World


def main() -> None:
    world = World.join(device="cpu", threads=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.Adam(model.parameters())
    alone = World(0, 1, world.local_rank, world.device)
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(world.rank))
    calls = 0
    fails_at = 1 << 30
    now_s = 0.0
    whole_step.time = SimpleNamespace(perf_counter=lambda: now_s)  # type: ignore[attr-defined]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls, now_s
        calls += 1
        now_s += 1e-3 * (1 + world.rank)  # the other one is slower
        # A script may send something of its own: then all must make as many steps.
        number = torch.tensor([float(calls)])
        dist.all_reduce(number)
        assert float(number) == 2.0 * calls
        if world.rank == 1 and calls == fails_at:
            raise ValueError("not finite")
        return model(batch).square().mean()

    def make(plan: Plan) -> PlannedStep:
        return PlannedStep(model, loss_fn, optimizer, plan, world=alone, is_undone=True)

    def timed(left_s: float) -> dict[str, Any]:
        nonlocal calls
        calls = 0
        before = [p.detach().clone() for p in model.parameters()]
        found: dict[str, Any] = {"seconds": {}, "error": ""}
        plan = Plan(workers=1, threads=1)
        with taken_back(make, plan, Script(model, loss_fn, optimizer), [batch]) as step:
            try:
                found["seconds"] = phase_seconds(step, batch, world, left_s)
            except (RidgelineError, OtherFailedError, ValueError) as error:
                found["error"] = f"{type(error).__name__}: {error}"
            found["calls"] = calls  # it is taken back, too
        found["is_undone"] = all(map(torch.equal, before, model.parameters()))
        return found

    told = {"all": timed(60.0), "no time": timed(0.0)}
    fails_at = 3
    told["one fails"] = timed(60.0)
    fails_at = 12
    told["one fails later"] = timed(60.0)
    (Path(sys.argv[1]) / f"{world.rank}.json").write_text(json.dumps(told))
    World.leave()


if __name__ == "__main__":
    main()
