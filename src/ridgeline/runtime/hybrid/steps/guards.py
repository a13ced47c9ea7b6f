"""What a traced step takes for granted: settings, flags and addresses, compared before every step."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.runtime.hybrid.steps.hooks import HookGuard
from ridgeline.runtime.hybrid.steps.lifting import LiftedState

_NOT_BAKED = ("params", "lr", "initial_lr")


class StepGuards:
    """The constants that a trace baked in, and whether they still hold.

    Args:
        model: Its modules' training flags and hooks and its parameters' `requires_grad` are constants.
        optimizer: Its settings are constants, but for learning rates and tensors; it has no hooks.
        lifted: Its tensors' addresses are taken for granted.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, lifted: LiftedState) -> None:
        self._optimizer = optimizer
        self._lifted = lifted
        self._training = [(module, module.training) for module in model.modules()]
        self._trainable = [(p, p.requires_grad) for p in model.parameters()]
        self._settings = baked_settings(optimizer)
        self._hooks = HookGuard(model.modules(), model.parameters(), optimizer)

    def broken(self) -> str | None:
        """What does not hold any more, in words; None while everything does.

        Optimizer state loaded meanwhile is taken over, see `LiftedState.is_current`.

        Cost: About a microsecond, and 0.2 for each module and each parameter.
        """
        if not self._lifted.is_current():
            return "parameters or optimizer state were replaced"
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key, value in settings:
                now = group.get(key)
                if now is not value and now != value:
                    return f"the optimizer's {key} changed"
        for module, training in self._training:
            if module.training is not training:
                return "a training flag changed"
        for parameter, requires_grad in self._trainable:
            if parameter.requires_grad is not requires_grad:
                return "parameters were frozen or released"
        if not self._hooks.hold():
            return "hooks were added or removed"
        return None


def baked_settings(optimizer: Optimizer) -> list[list[tuple[str, Any]]]:
    """The settings of each group that a trace makes constants: all but learning rates and tensors."""
    return [
        [
            (key, value)
            for key, value in group.items()
            if key not in _NOT_BAKED and not isinstance(value, Tensor)
        ]
        for group in optimizer.param_groups
    ]
