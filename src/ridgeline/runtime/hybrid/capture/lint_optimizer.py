"""Which optimizers a capture can hold: a pure look at their settings.

Most of torch's optimizers have a `capturable` or a `fused` form, which `make_capturable` switches on, with
the learning rate in a tensor. What is found here is what that cannot change.

Source: torch/optim, releases 2.11 to 2.13. Capturable: Adadelta, Adam, AdamW, Adamax, ASGD, NAdam, RAdam,
RMSprop, Rprop. Fused only: SGD, Adagrad. Neither: Adafactor, LBFGS, Muon, SparseAdam.
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ridgeline.fused import NOT_FUSED_ON_GPU
from ridgeline.runtime.hybrid.capture.lint_rules import Finding, finding

READ_RATE_ON_HOST = ("Adadelta", "RMSprop")
"""Their form for one tensor at a time passes `alpha=-lr`, which reads the learning rate on the host."""

SILENT = {"foreach": None, "differentiable": False}
"""Settings as torch has them by default; a message leaves them out."""


def optimizer_findings(optimizer: Optimizer) -> tuple[Finding, ...]:
    """What keeps an optimizer out of a CUDA graph, after all that `make_capturable` would change.

    Only looks: nothing is changed or run.
    """
    name = type(optimizer).__name__
    found: list[Finding] = []
    for number, group in enumerate(optimizer.param_groups):
        line = f"param_groups[{number}] of the optimizer"
        if not has_device_form(name, group):
            found.append(finding("optimizer", _with_settings(name, group), line))
            if "lr" in group and not isinstance(group["lr"], Tensor):
                found.append(finding("learning-rate", f"lr={group['lr']!r} of {name}", line))
        elif _reads_rate(name, group):
            found.append(finding("rate-read", _with_settings(name, group), line))
    return tuple(found)


def has_device_form(name: str, group: dict[str, Any]) -> bool:
    """Whether a group of the optimizer class `name` has a step that runs on the device alone."""
    if "capturable" in group:
        return True
    parameters = group["params"]
    if "fused" not in group or group.get("differentiable"):
        return False
    is_on_gpu = any(parameter.device.type == "cuda" for parameter in parameters)
    if is_on_gpu and name in NOT_FUSED_ON_GPU:
        return False
    return all(parameter.is_floating_point() for parameter in parameters)


def _reads_rate(name: str, group: dict[str, Any]) -> bool:
    takes_one_by_one = group.get("foreach") is False or group.get("differentiable", False)
    return name in READ_RATE_ON_HOST and takes_one_by_one


def _with_settings(name: str, group: dict[str, Any]) -> str:
    """The class with those settings that decide here."""
    decisive = {key: group.get(key, usual) for key, usual in SILENT.items()}
    shown = [f"{key}={value}" for key, value in decisive.items() if value != SILENT[key]]
    return f"{name}({', '.join(shown)})" if shown else name
