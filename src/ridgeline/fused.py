"""Which optimizers a captured step runs in their fused form: a kernel that reads and writes each value once.

The runtime switches to it, and the tracer tells the simulator what it moves.
"""

from collections.abc import Mapping
from typing import Any

NOT_FUSED_ON_GPU = ("Adagrad",)
"""Optimizers with a fused form for CPUs alone. Source: torch/optim/adagrad.py, releases 2.11 to 2.13."""


def takes_fused_form(optimizer: str, group: Mapping[str, Any]) -> bool:
    """Whether a parameter group is switched to its fused form when its step is captured.

    Where there is another form that can be captured, doubles take that (fused kernels would round their
    learning rate), and so does a user who asked for `foreach`.

    Args:
        optimizer: Name of the optimizer's class.
        group: One of its `param_groups`.
    """
    if "fused" not in group or group.get("differentiable"):
        return False
    parameters = group["params"]
    if optimizer in NOT_FUSED_ON_GPU and any(p.device.type == "cuda" for p in parameters):
        return False
    if not all(p.is_floating_point() for p in parameters):
        return False
    return not ("capturable" in group and (group.get("foreach") or has_double(group)))


def has_double(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group has parameters of float64."""
    return any(p.is_floating_point() and p.itemsize == 8 for p in group["params"])
