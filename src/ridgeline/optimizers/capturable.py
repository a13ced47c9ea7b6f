"""Making an optimizer fit for capture: everything that changes between steps lives in tensors.

A captured step replays with the numbers it was captured with. So the learning rate becomes a tensor on
the device (schedulers write into it), step counts live on the device, and every other setting is
watched: when one changes, the step is captured again.
"""

import copy
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ridgeline.errors import PlanError
from ridgeline.optimizer_forms import cycled_setting, has_double, takes_fused_form
from ridgeline.optimizers.fused_limits import why_not_fused
from ridgeline.optimizers.groups import state_methods

Settings = tuple[tuple[str, Any], ...]
INEXACT = {
    "RAdam": "its form for captures computes in single precision how far to trust its averages"
}
"""Optimizers of torch whose capturable form trains otherwise, and why.

Source: torch/optim/radam.py, releases 2.11 to 2.13: a difference of numbers near 2,000, which counts in
float32 leave so that the update is 0.6 % off in steps 6 to 8; as a loop runs it, these are Python's numbers.
"""
_MUTABLE: tuple[type[Any], ...] = (list, dict, set)


def make_capturable(optimizer: Optimizer, device: torch.device) -> tuple[str, ...]:
    """Change the settings of `optimizer` so that its step can be captured; what was changed.

    The maths stays: `capturable` and `fused` select other kernels of the same update. One fused kernel reads
    and writes each value once, so it is taken wherever there is one and the user asked for no other.

    Raises:
        PlanError: the optimizer has neither a capturable nor a fused implementation for its parameters.
    """
    changed = []
    for number, group in enumerate(optimizer.param_groups):
        # Before the rate's type is asked for, which depends on the form.
        form = _choose_form(optimizer, group)
        dtype = _rate_dtype(group)
        rate = group["lr"]
        if not isinstance(rate, Tensor):
            # A tensor, since a graph would replay the number that it was captured with.
            group["lr"] = torch.tensor(float(rate), dtype=dtype, device=device)
        elif rate.device != device:
            group["lr"] = rate.to(device)
        changed.append(f"optimizer group {number} uses its {form} form, learning rate in a tensor")
        if dtype == torch.float32 and has_double(group):
            changed.append(
                f"optimizer group {number} trains float64 parameters with a learning rate rounded to "
                "float32, which is what its fused form takes"
            )
    for state in state_methods(optimizer).values(optimizer.state):
        _move(state, device)
    return tuple(changed)


def make_fused(optimizer: Optimizer, device: torch.device) -> tuple[str, ...]:
    """Switch every parameter group that has one to its fused form; what was changed.

    The maths stays; one kernel reads and writes each value once.
    """
    changed = []
    for number, group in enumerate(optimizer.param_groups):
        if group.get("fused") or not takes_fused_form(type(optimizer).__name__, group):
            continue
        if (why := why_not_fused(optimizer, group)) is not None:
            changed.append(_not_fused(number, why))
            continue
        # torch refuses both at once.
        group["fused"], group["foreach"] = True, False
        changed.append(f"optimizer group {number} uses its fused form")
        for parameter in group["params"]:
            # Fused kernels read the count of steps on the device.
            _move(optimizer.state.get(parameter, {}), device)
    return tuple(changed)


def has_no_form_for_captures(optimizer: Optimizer) -> bool:
    """Whether its form for captures is another update, or its parameters keep it from the only one it has."""
    return type(optimizer).__name__ in INEXACT or any(
        "capturable" not in group and why_not_fused(optimizer, group) is not None
        for group in optimizer.param_groups
    )


def stepping_outside(optimizer: Optimizer) -> str:
    """What is said of an optimizer that no graph is to hold."""
    name = type(optimizer).__name__
    why = INEXACT.get(name, "no graph can hold it")
    if setting := next(filter(None, map(cycled_setting, optimizer.param_groups)), ""):
        why = f"a scheduler changes its {setting} between steps, and replays would repeat one value"
    return f"the optimizer {name} steps outside of the graph: {why}"


def give_up_fused(optimizer: Optimizer) -> tuple[str, ...]:
    """Switch groups back whose parameters keep them from their fused form; what was changed."""
    changed = []
    for number, group in enumerate(optimizer.param_groups):
        if "fused" in group and (why := why_not_fused(optimizer, group)) is not None:
            group["fused"] = False
            changed.append(_not_fused(number, why))
    return tuple(changed)


def _move(state: dict[str, Any], device: torch.device) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device != device:
            state[key] = value.to(device)


def _not_fused(number: int, why: str) -> str:
    return f"optimizer group {number} does not use its fused form: {why}"


def _choose_form(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Switch a group to the form that can be captured; its name."""
    name = type(optimizer).__name__
    is_capturable = "capturable" in group
    why = why_not_fused(optimizer, group)
    is_fused = takes_fused_form(name, group) and why is None
    if not is_capturable and not is_fused:
        because = "" if why is None else f" for its parameters ({why})"
        raise PlanError(
            f"wanted an optimizer that can be captured, got {name} whose step has neither a "
            f"capturable nor a fused form{because}; use execution='eager' or another optimizer"
        )
    if is_capturable:
        group["capturable"] = True
    if is_fused:
        group["fused"], group["foreach"] = True, False
    elif why is not None:
        group["fused"] = False
    names = [name for name in ("capturable", "fused") if group.get(name)]
    return " and ".join(names)


def _rate_dtype(group: dict[str, Any]) -> torch.dtype:
    """Fused kernels read the learning rate as float32; others take it as exact as the parameters."""
    return torch.float64 if has_double(group) and not group.get("fused") else torch.float32


def _settings_of(optimizer: Optimizer) -> tuple[Settings, ...]:
    """All settings that a capture bakes in, as they are now: those that are not tensors."""
    return tuple(
        tuple(
            (key, copy.deepcopy(value) if isinstance(value, _MUTABLE) else value)
            for key, value in group.items()
            # `initial_lr` is a note of schedulers, which no step reads; tensors are read by the replay
            # itself.
            if key not in ("params", "initial_lr") and not isinstance(value, Tensor)
        )
        for group in optimizer.param_groups
    )


class WatchedSettings:
    """The settings that a capture bakes in, watched before every step; frozen ones cannot change in place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._settings = _settings_of(optimizer)
        self._values = _values(optimizer)
        self.are_frozen = not any(
            isinstance(value, _MUTABLE) and key != "params"
            for group in optimizer.param_groups
            for key, value in group.items()
        )

    def changed(self) -> bool:
        """Whether a setting has another value now.

        Cost: 1 us while all values are the same objects.
        """
        values = _values(self._optimizer)
        # By identity first: equality of settings would cost every step more.
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        if is_same and self.are_frozen:
            return False
        if _settings_of(self._optimizer) != self._settings:
            return True
        # Equal values in other objects: from now on these are known by identity.
        self._values = values
        return False


def _values(optimizer: Optimizer) -> list[Any]:
    return [value for group in optimizer.param_groups for value in group.values()]


def _copied(rate: Any) -> Any:
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


class LearningRates:
    """The learning-rate tensors that a captured step reads, kept in force.

    A scheduler fills the tensor in place; code that assigns a float replaces it, and `refresh` writes
    that float into the tensor and puts the tensor back. Rates that are numbers are left alone: the optimizer
    reads them again in each step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._tensors = [group.get("lr") for group in optimizer.param_groups]

    def replaced(self) -> list[tuple[dict[str, Any], Tensor]]:
        """Groups in which something else stands now, each with its tensor."""
        pairs = zip(self._optimizer.param_groups, self._tensors, strict=True)
        return [(g, t) for g, t in pairs if isinstance(t, Tensor) and g["lr"] is not t]

    @property
    def num_groups(self) -> int:
        """How many groups the optimizer had."""
        return len(self._tensors)

    def refresh(self) -> None:
        """Make the captured tensors hold what the optimizer's groups say."""
        # All are read before any is written: groups in another order have the tensors of one another.
        found = [(g, t, _copied(g["lr"])) for g, t in self.replaced()]
        for group, tensor, rate in found:
            # The replay reads the address of the tensor that was captured, whatever stands in the group.
            if isinstance(rate, Tensor):
                tensor.copy_(rate)
            else:
                tensor.fill_(rate)
            group["lr"] = tensor

    def scale(self, factor: float) -> None:
        """Multiply all learning rates; tensors in place."""
        for group in self._optimizer.param_groups:
            if isinstance(group.get("lr"), Tensor):
                group["lr"].mul_(factor)
            elif group.get("lr") is not None:  # Adafactor finds its own rates, and has None
                group["lr"] *= factor
