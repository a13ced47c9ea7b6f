"""Making an optimizer fit for capture: everything that changes between steps lives in tensors.

A captured step replays with the numbers it was captured with. So the learning rate becomes a tensor on
the device (schedulers write into it), step counts live on the device, and every other setting is
watched: when one changes, the step is captured again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ridgeline.errors import PlanError

Settings = tuple[tuple[str, Any], ...]


def make_capturable(optimizer: Optimizer, device: torch.device) -> tuple[str, ...]:
    """Change the settings of `optimizer` so that its step can be captured; what was changed.

    The maths stays: `capturable` and `fused` select other kernels of the same update.

    Raises:
        PlanError: the optimizer has neither a capturable nor a fused implementation.
    """
    changed = []
    for number, group in enumerate(optimizer.param_groups):
        if "capturable" in group:
            group["capturable"] = True
        elif "fused" in group:
            group["fused"], group["foreach"] = True, False
        else:
            raise PlanError(
                f"wanted an optimizer that can be captured, got {type(optimizer).__name__} whose step has "
                "neither a capturable nor a fused form; use execution='eager' or another optimizer"
            )
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
        elif group["lr"].device != device:
            group["lr"] = group["lr"].to(device)
        form = "capturable" if "capturable" in group else "fused"
        changed.append(f"optimizer group {number} uses its {form} form, learning rate in a tensor")
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.device != device:
                state[key] = value.to(device)
    return tuple(changed)


def settings_of(optimizer: Optimizer) -> tuple[Settings, ...]:
    """All settings that a capture bakes in: those that are not tensors."""
    return tuple(
        tuple(
            (key, value)
            for key, value in group.items()
            if key not in ("params", "initial_lr") and not isinstance(value, Tensor)
        )
        for group in optimizer.param_groups
    )


class LearningRates:
    """The learning-rate tensors that a captured step reads, kept in force.

    A scheduler fills the tensor in place; code that assigns a float replaces it, and `refresh` writes
    that float into the tensor and puts the tensor back.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors = [group["lr"] for group in optimizer.param_groups]

    def refresh(self) -> None:
        """Make the captured tensors hold what the optimizer's groups say."""
        for group, tensor in zip(self._optimizer.param_groups, self._tensors, strict=True):
            if group["lr"] is not tensor:
                tensor.copy_(group["lr"]) if isinstance(group["lr"], Tensor) else tensor.fill_(
                    group["lr"]
                )
                group["lr"] = tensor

    def scale(self, factor: float) -> None:
        """Multiply all learning rates, in place."""
        for tensor in self._tensors:
            tensor.mul_(factor)
