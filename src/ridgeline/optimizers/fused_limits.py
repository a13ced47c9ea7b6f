"""What keeps the parameters of a group from one fused kernel: memory that two share, state of another type.

A fused kernel updates all of them at once, as `foreach` does: where two share memory, who reads before the
other has written is chance on a GPU. One after another they have one result. State is of another type than
its parameter where user code has changed the model's; the plain SGD continues with it, and the fused one
raises a RuntimeError (torch 2.11 to 2.13), as it does for views that torch negates when they are read.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ridgeline.optimizers.groups import state_methods


def why_not_fused(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """What keeps a group from its fused form, in words; None if nothing does.

    Cost: About 1.5 us a parameter.
    """
    if (pair := sharing(group["params"])) is not None:
        return f"parameters {pair[0]} and {pair[1]} share memory"
    for number, parameter in enumerate(group["params"]):
        if parameter.is_neg():
            return f"parameter {number} is a view of its negative"
        for key, value in state_methods(optimizer).get(optimizer.state, parameter, {}).items():
            if _is_of_another_type(value, parameter):
                return (
                    f"{key} of parameter {number} is {value.dtype}, the parameter {parameter.dtype}"
                )
    return None


def sharing(parameters: list[Tensor]) -> tuple[int, int] | None:
    """Numbers of two parameters that share memory, if there are any."""
    # Sorted by address, where only neighbours can overlap: pairs of all would be millions for large models.
    starts = sorted([(p.data_ptr(), n) for n, p in enumerate(parameters) if has_memory(p)])
    furthest, last = 0, -1
    for begin, number in starts:
        if begin < furthest:
            return min(last, number), max(last, number)
        furthest, last = begin + _extent(parameters[number]), number
    return None


def has_memory(parameter: Tensor) -> bool:
    """Whether a parameter has an address: not one that wraps other tensors, nor a sparse one."""
    if type(parameter) is not Parameter and is_traceable_wrapper_subclass(parameter):
        return False
    return parameter.layout is torch.strided


def _extent(parameter: Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    if parameter.is_contiguous() or not parameter.numel():
        return parameter.nbytes
    pairs = zip(parameter.shape, parameter.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in pairs)) * parameter.itemsize


def _is_of_another_type(value: Any, parameter: Tensor) -> bool:
    """Whether it is state of a parameter's elements whose type is not theirs; counts of steps are not."""
    return (
        isinstance(value, Tensor)
        and value.dtype is not parameter.dtype
        and value.is_floating_point()
        and value.shape == parameter.shape
    )
