"""Which optimizers a capture can hold: a pure look at their settings.

Most of torch's optimizers have a `capturable` or a `fused` form, which `make_capturable` switches on, with
the learning rate in a tensor. What is found here is what that cannot change; see `ridgeline.optimizer_forms`.
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ridgeline.lint.lint_rules import Finding
from ridgeline.optimizer_forms import has_device_form, has_step_of_torch, reads_rate
from ridgeline.optimizers.fused_limits import why_not_fused

SILENT = {"foreach": None, "differentiable": False}
"""Settings as torch has them by default; a message leaves them out."""


def optimizer_findings(optimizer: Optimizer) -> tuple[Finding, ...]:
    """What keeps an optimizer out of a CUDA graph, after all that `make_capturable` would change.

    Only looks: nothing is changed or run.
    """
    name = type(optimizer).__name__
    if not has_step_of_torch(optimizer):
        return (Finding("own-step", name, f"{type(optimizer).__module__}.{name}.step"),)
    found: list[Finding] = []
    for number, group in enumerate(optimizer.param_groups):
        line = f"param_groups[{number}] of the optimizer"
        # The first that applies: with no form for the device, the others follow from it.
        if not has_device_form(name, group):
            found.append(Finding("optimizer", _with_settings(name, group), line))
            if "lr" in group and not isinstance(group["lr"], Tensor):
                found.append(Finding("learning-rate", f"lr={group['lr']!r} of {name}", line))
        elif "capturable" not in group and (why := why_not_fused(optimizer, group)) is not None:
            found.append(Finding("optimizer", f"{_with_settings(name, group)}, where {why}", line))
        elif reads_rate(name, group):
            found.append(Finding("rate-read", _with_settings(name, group), line))
    return tuple(found)


def _with_settings(name: str, group: dict[str, Any]) -> str:
    decisive = {key: group.get(key, usual) for key, usual in SILENT.items()}
    shown = [f"{key}={value}" for key, value in decisive.items() if value != SILENT[key]]
    return f"{name}({', '.join(shown)})" if shown else name
