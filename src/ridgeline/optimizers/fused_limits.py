"""What keeps a group from one fused kernel: memory that two share, state of another type, sparse gradients.

A fused kernel updates all of them at once, as `foreach` does: where two share memory, who reads before the
other has written is chance on a GPU. One after another they have one result. State is of another type than
its parameter where user code has changed the model's; the plain SGD continues with it, and the fused one
raises a RuntimeError (torch 2.11 to 2.13), as it does for sparse gradients and for views that torch negates
when they are read.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ridgeline.optimizers.groups import state_methods
from ridgeline.optimizers.shared_memory import sharing


def why_not_fused(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """What keeps a group from its fused form, in words; None if nothing does.

    Cost: About 1.5 us a parameter.
    """
    if (pair := sharing(group["params"])) is not None:
        return f"parameters {pair[0]} and {pair[1]} share memory"
    for number, parameter in enumerate(group["params"]):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            return f"the gradient of parameter {number} is sparse"
        if parameter.is_neg():
            return f"parameter {number} is a view of its negative"
        for key, value in state_methods(optimizer).get(optimizer.state, parameter, {}).items():
            if _is_of_another_type(value, parameter):
                return (
                    f"{key} of parameter {number} is {value.dtype}, the parameter {parameter.dtype}"
                )
    return None


def _is_of_another_type(value: Any, parameter: Tensor) -> bool:
    """Whether it is state of a parameter's elements whose type is not theirs; counts of steps are not."""
    return (
        isinstance(value, Tensor)
        and value.dtype is not parameter.dtype
        and value.is_floating_point()
        and value.shape == parameter.shape
    )
