"""What a script gives to a training step: a model, a function of it and a batch, an optimizer."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ridgeline.errors import PlanError
from ridgeline.execution import MODES
from ridgeline.plan import Execution

_LOSSES = "torch.nn.modules."
"""Where torch's own criteria are, whose calls take outputs and targets."""


def check_parts(model: object, loss_fn: object, optimizer: object) -> None:
    """A step calls `loss_fn(model, batch)`.

    Raises:
        PlanError: the model is no module, the optimizer none of torch's, or the loss cannot be called so: it
            is one of torch's own, which take outputs and targets.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"wanted a torch.nn.Module as model, got {_named(model)}; put what it does into the forward of a "
            "module that holds its parameters"
        )
    if not callable(loss_fn):
        raise PlanError(
            f"wanted a loss_fn that takes the model and a batch, got {_named(loss_fn)}; write one, such as "
            "lambda model, batch: model(batch).mean()"
        )
    name = _named(loss_fn)
    # By identity: a user's own function may well be called `cross_entropy`.
    is_functional = getattr(nn.functional, name, None) is loss_fn
    if type(loss_fn).__module__.startswith(_LOSSES) or is_functional:
        raise PlanError(
            f"wanted a loss_fn that takes the model and a batch, got {name}, which takes outputs and "
            "targets; write lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    _check_arguments(loss_fn)
    _check_optimizer(optimizer)


def check_shaped(model: nn.Module, execution: Execution) -> None:
    """Lazy modules get their parameters in the first step, which not every execution runs as it was written.

    Raises:
        PlanError: there is one, and the execution is neither eager nor one program.
    """
    if execution == "eager" or MODES[execution].is_one_program:
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise PlanError(
                f"wanted parameters and buffers that have their shapes for execution={execution!r}, got "
                f"{name} of a lazy module, which takes them from its first batch; call the model once with "
                "an example before, or use execution='eager'"
            )


def is_clip_norm(value: object) -> bool:
    """Whether gradients can be clipped by this: None, or a finite number above 0.

    A norm of 0 would train nothing, and a negative one uphill.
    """
    if value is None:
        return True
    # `True` is an int to Python, and would clip to a norm of 1.
    return isinstance(value, int | float) and value is not True and 0.0 < value < math.inf


def check_clip_norm(clip_norm: float | None) -> None:
    """Refuse what is no `is_clip_norm`.

    Raises:
        PlanError: names the value and what to give.
    """
    if not is_clip_norm(clip_norm):
        raise PlanError(
            f"wanted clip_norm as a finite number above 0, or None, got {clip_norm!r}; give the largest "
            "total norm that gradients may have, or None to leave them as they are"
        )


def _named(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _check_arguments(loss_fn: Any) -> None:
    """A function that takes something else is named before anything is measured."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # written in C, or compiled: its call will tell
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        name = _named(loss_fn)
        raise PlanError(
            f"wanted a loss_fn that takes the model and a batch, got {name}{signature}; write a function of "
            f"both that calls it, such as lambda model, batch: model.{name}(batch, 0) for a method of the "
            "model that takes the batch and its number"
        ) from error


def _check_optimizer(optimizer: object) -> None:
    """A step calls the methods of one optimizer of torch, not of what wraps or holds one."""
    if not isinstance(optimizer, Optimizer):
        place, held = "attribute", dict(getattr(optimizer, "__dict__", {}))
        if isinstance(optimizer, Mapping):
            place, held = "entry", dict(optimizer)
        elif isinstance(optimizer, Sequence):
            place, held = "entry", dict(enumerate(optimizer))
        inner = [name for name, part in held.items() if isinstance(part, Optimizer)]
        what = f"the one in its {place} {inner[0]!r}" if inner else "the one that it wraps, if any"
        raise PlanError(
            f"wanted a torch.optim.Optimizer, got {type(optimizer).__name__}; give {what}, and call "
            "whatever else it does (setting learning rates, say) before or after each step"
        )
