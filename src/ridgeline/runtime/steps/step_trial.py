"""What a child process does to find out whether a training step can be captured: it takes some.

Found by name (see `lint.child_trial`), since a step uses the linter, which starts such trials.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep


def run_steps(
    *,
    model: nn.Module,
    loss_fn: Any,
    optimizer: Optimizer,
    attributes: Mapping[str, Any],
    batch: Any,
    plan: Plan,
    clip_norm: float | None,
    device: str,
    steps: int,
) -> None:
    """Train some steps under the plan, and wait for the device; pickle lost the optimizer's `attributes`."""
    vars(optimizer).update(attributes)
    with PlannedStep(model, loss_fn, optimizer, plan, clip_norm=clip_norm, device=device) as step:
        for _ in range(steps):
            step(batch)
        # What a kernel did wrong is raised when the host waits for it, which the child's end would not do.
        if device == "cuda":
            torch.cuda.synchronize()
