"""What fused optimizers take for granted: a parameter and all beside it in one order of memory.

Their kernels walk through memory and ask for no strides. Where a gradient or a moment lies otherwise than
its parameter, or a parameter has gaps, those for CPUs mix elements up and say nothing (torch 2.11 to 2.13:
three steps of SGD on a transposed matrix of normal numbers are off by 1.5), and those for GPUs refuse it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ridgeline.optimizer_forms import is_dense
from ridgeline.runtime.fused_limits import why_not_fused


def lay_out_for_fused(optimizer: Optimizer) -> None:
    """Before a step: give gradients and state the layout of their parameters, in groups that are fused.

    A group with a parameter that has gaps is fused no longer, nor one that `fused_limits` keeps from it.

    Cost: About 2 us a parameter of such a group; a copy of what lies otherwise. Replays do without.
    """
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        if not all(map(is_dense, group["params"])) or why_not_fused(optimizer, group) is not None:
            group["fused"] = False
            continue
        for parameter in group["params"]:
            if parameter.grad is not None:
                _lay_out(parameter, parameter.grad, optimizer.state.get(parameter, {}))


def _lay_out(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
    if _lies_otherwise(gradient, parameter):
        parameter.grad = _like(gradient, parameter)
    for key, value in state.items():
        if isinstance(value, Tensor) and _lies_otherwise(value, parameter):
            state[key] = _like(value, parameter)


def _lies_otherwise(tensor: Tensor, parameter: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.shape != parameter.shape:
        return False
    strides, wanted = tensor.stride(), parameter.stride()
    if strides == wanted:
        return False
    triples = zip(tensor.shape, strides, wanted, strict=True)
    return any(size > 1 and mine != theirs for size, mine, theirs in triples)


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    laid_out = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(tensor.detach())
