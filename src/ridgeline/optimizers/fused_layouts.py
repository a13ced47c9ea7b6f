"""What fused optimizers take for granted: a parameter and all beside it in one order of memory.

Their kernels walk through memory and ask for no strides. Where a gradient or a moment lies otherwise than
its parameter, or a parameter has gaps, those for CPUs mix elements up and say nothing (torch 2.11 to 2.13:
three steps of SGD on a transposed matrix of normal numbers are off by 1.5), and those for GPUs refuse it.
"""

from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ridgeline.optimizer_forms import is_dense
from ridgeline.optimizers.fused_limits import why_not_fused
from ridgeline.optimizers.groups import state_methods
from ridgeline.optimizers.shared_memory import has_memory

_Place = tuple[int, int, tuple[int, ...]]
"""Where a parameter lies: its address, its number of elements, its strides."""

_cleared: WeakKeyDictionary[Optimizer, list[list[_Place]]] = WeakKeyDictionary()
"""Where the parameters of each group lay when it was last found fit for a fused kernel."""


def lay_out_for_fused(optimizer: Optimizer) -> None:
    """Before a step: give gradients and state the layout of their parameters, in groups that are fused.

    A group with a parameter that has gaps is fused no longer, nor one that `fused_limits` keeps from it.
    Whether it has is looked at where its parameters have moved since the last step.

    Cost: About 1 us a parameter of such a group, a tenth of its update in Python; a copy of what lies
    otherwise. Replays do without.
    """
    groups = optimizer.param_groups
    cleared = _cleared.get(optimizer)
    places = [
        _places_if_fit(optimizer, group, before)
        for group, before in zip_longest(groups, (cleared or ())[: len(groups)])
    ]
    if not any(places):
        return
    # Kept by place: a group that was fit stays so until one of its parameters lies elsewhere.
    if places != cleared:
        _cleared[optimizer] = places
    for group, wanted in zip(groups, places, strict=True):
        if wanted:
            _lay_out_gradients(group["params"], wanted)
    _lay_out_state(optimizer)


def _places_if_fit(
    optimizer: Optimizer, group: dict[str, Any], cleared: list[_Place] | None
) -> list[_Place]:
    """Where the parameters of a group lie; an empty list, and no fused kernel, if it does not fit them."""
    if not group.get("fused"):
        return []
    parameters = group["params"]
    places = [
        (p.data_ptr(), p.numel(), p.stride())
        # The cheap question first: nearly all parameters are plain, and this is asked in every step.
        if (type(p) is Parameter and not p.is_sparse) or has_memory(p)
        else (0, p.numel(), p.stride())
        for p in parameters
    ]
    if places == cleared:
        return places
    if not all(map(is_dense, parameters)) or why_not_fused(optimizer, group) is not None:
        group["fused"] = False
        return []
    return places


def _lay_out_gradients(parameters: list[Tensor], places: list[_Place]) -> None:
    for parameter, (_, _, strides) in zip(parameters, places, strict=True):
        gradient = parameter.grad
        if gradient is None or gradient.stride() == strides:
            continue
        if _lies_otherwise(gradient, parameter):
            parameter.grad = _laid_out(gradient, parameter)


def _lay_out_state(optimizer: Optimizer) -> None:
    """Of the parameters that are in a group with a fused kernel.

    Goes through the state as a whole: to look a parameter up takes as long as all else here.
    """
    kept = {
        id(p) for group in optimizer.param_groups if not group.get("fused") for p in group["params"]
    }
    for parameter, state in state_methods(optimizer).items(optimizer.state):
        if not isinstance(parameter, Tensor):
            continue
        strides = parameter.stride()
        for key, value in state.items():
            if (
                # A count has no layout.
                key != "step"
                and isinstance(value, Tensor)
                and value.stride() != strides
                and id(parameter) not in kept
                and _lies_otherwise(value, parameter)
            ):
                state[key] = _laid_out(value, parameter)


def _lies_otherwise(tensor: Tensor, parameter: Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.shape != parameter.shape:
        return False
    strides, wanted = tensor.stride(), parameter.stride()
    if strides == wanted:
        return False
    triples = zip(tensor.shape, strides, wanted, strict=True)
    # The stride of a dimension of one element is never used, and may be anything.
    return any(size > 1 and mine != theirs for size, mine, theirs in triples)


def _laid_out(tensor: Tensor, parameter: Tensor) -> Tensor:
    laid_out = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(tensor.detach())
