"""An optimizer's two calls without what torch puts around them for a profiler, where no profiler runs.

Their names and empty hooks take 40 us on a slow host, a sixth of the smallest steps.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler
from torch.optim import SGD, Optimizer
from torch.optim import optimizer as base

from ridgeline.optimizers.fused_layouts import lay_out_for_fused

_ZERO_GRAD = Optimizer.zero_grad
_STEP_WRAPPER: Any = Optimizer.profile_hook_step(lambda: None).__code__  # type: ignore[attr-defined]
"""Torch's own methods, to be distinguished from those that other code puts around them or in their place."""


def clear_gradients(optimizer: Optimizer) -> None:
    """`optimizer.zero_grad(set_to_none=True)`."""
    if type(optimizer).zero_grad is not _ZERO_GRAD or _is_patched(optimizer, "zero_grad"):
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Reading costs less than writing, which goes through a setter of torch's.
            if parameter.grad is not None:
                parameter.grad = None


def clear_others(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """Set the gradients of those parameters to None that the optimizer does not hold.

    Cost: About 0.1 us a parameter.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in held:
            parameter.grad = None


def update(optimizer: Optimizer) -> None:
    """`optimizer.step()`."""
    lay_out_for_fused(optimizer)
    with unfused_where_momenta_are_missing(optimizer):
        _step(optimizer)


def update_in_order(optimizer: Optimizer) -> None:
    """`update`, with the same bits on all workers where it adds rows to tables on GPUs.

    Momenta of sparse gradients hold rows twice, and CUDA adds these in no defined order unless torch is
    asked for deterministic algorithms; then workers that began equal do not stay so.

    Source: `torch.use_deterministic_algorithms` on `index_add_`, by which a sparse tensor that is not
    coalesced is added to a dense one.
    """
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    # Only warns: other operators of the step may have no deterministic form, and raise.
    torch.use_deterministic_algorithms(True, warn_only=not is_on or only_warns)
    try:
        update(optimizer)
    finally:
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)


def _step(optimizer: Optimizer) -> None:
    call: Any = type(optimizer).step
    is_torchs = getattr(call, "__code__", None) is _STEP_WRAPPER
    if not is_torchs or _is_patched(optimizer, "step") or _has_hooks(optimizer):
        optimizer.step()
    else:
        # The function below the wrapper: what `step` itself does, with its own `no_grad`.
        call.__wrapped__(optimizer)


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks  # noqa: SLF001 - what `register_step_pre_hook` fills
        or optimizer._optimizer_step_post_hooks  # noqa: SLF001
        or base._global_optimizer_pre_hooks  # noqa: SLF001
        or base._global_optimizer_post_hooks  # noqa: SLF001
    )


def _is_patched(optimizer: Optimizer, name: str) -> bool:
    """Whether the object has a method of its own, as under a scheduler, or a profiler is to see the call."""
    return name in vars(optimizer) or profiler._is_profiler_enabled  # noqa: SLF001 - as torch asks it


_NOTHING = contextlib.nullcontext()


def unfused_where_momenta_are_missing(
    optimizer: Optimizer,
) -> contextlib.AbstractContextManager[Any]:
    """A step inside is not fused in groups of SGD in which some parameters have momenta and some none.

    Cost: About 0.3 us a parameter of a fused group with momentum. Replays do without.
    """
    if not isinstance(optimizer, SGD):
        return _NOTHING
    mixed = [group for group in optimizer.param_groups if _is_mixed(optimizer, group)]
    return _unfused(mixed) if mixed else _NOTHING


def _is_mixed(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if not group.get("fused") or not group["momentum"]:
        return False
    stepping = (p for p in group["params"] if p.grad is not None)
    has = {optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in stepping}
    return len(has) > 1


@contextlib.contextmanager
def _unfused(groups: list[dict[str, Any]]) -> Any:
    for group in groups:
        group["fused"] = False
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = True
