"""What a traced step takes for granted of optimizer and model; compared before every step."""

import copy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.capture.casts import casting
from ridgeline.guards.model_guard import ModelGuard
from ridgeline.optimizers.step_hooks import replaced_methods, step_hooks
from ridgeline.runtime.steps.body.capture_watch import module_hooks, of_accumulation, of_gradient
from ridgeline.runtime.steps.whole_step.lifting import LiftedState
from ridgeline.runtime.steps.whole_step.optimizer_reads import OptimizerReads
from ridgeline.tensors.entries import Entries

_NOT_BAKED = ("params", "lr", "initial_lr")
_MUTABLE = (list, dict, set)


class StepGuards:
    """The constants that a trace baked in, and whether they still hold.

    Args:
        model: Its modules, their training flags and hooks and its parameters' `requires_grad` are constants.
        optimizer: Its settings are constants, but for learning rates; tensors among them are read where they
            lie. It has no hooks, and the methods of its class. So is what code of another's than torch reads.
        lifted: Its tensors' addresses are taken for granted.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, lifted: LiftedState) -> None:
        self._optimizer = optimizer
        self._lifted = lifted
        self._model = ModelGuard(model)
        self._parameters = [*lifted.parameters().values()]
        stores = module_hooks(self._model.modules)
        # Kept apart, since most have no hooks, and `any` over empty dictionaries costs least.
        self._hooks = Entries(store for store in stores if store)
        self._without_hooks = [store for store in stores if not store] + step_hooks(optimizer)
        self._step = type(optimizer).step
        # Copies of what can change in place, which would be equal to itself for ever.
        self._settings = [
            [(k, copy.deepcopy(v) if isinstance(v, _MUTABLE) else v) for k, v in settings]
            for settings in baked_settings(optimizer)
        ]
        self._tensors = [
            (group, key, value)
            for group in optimizer.param_groups
            for key, value in group.items()
            if key not in _NOT_BAKED and isinstance(value, Tensor)
        ]
        self._reads = OptimizerReads(optimizer)
        self._casting = casting()

    def broken(self) -> str | None:
        """What does not hold any more, in words; None while everything does.

        Optimizer state loaded meanwhile is taken over, see `LiftedState.is_current`.

        Cost: A few microseconds, and 0.25 for each module and each parameter (under AdamW).
        """
        if not self._lifted.is_current():
            return "parameters or optimizer state were replaced"
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key, value in settings:
                now = group.get(key)
                # Identity first: it is true nearly always, and equality of tuples costs more.
                if now is not value and (isinstance(now, Tensor) or now != value):
                    return f"the optimizer's {key} changed"
        # By identity: the program reads the tensor that it was traced with, whatever stands in the group.
        for group, key, tensor in self._tensors:
            if group.get(key) is not tensor:
                return f"the optimizer's {key} changed"
        why = self._model.changed()
        if why is not None:
            return why
        has_more = any(self._without_hooks) or any(map(of_gradient, self._parameters))
        if has_more or any(map(of_accumulation, self._parameters)) or not self._hooks.hold():
            return "hooks were added or removed"
        is_same = type(self._optimizer).step is self._step
        if not is_same or replaced_methods(self._optimizer):
            return "a method of the optimizer was replaced"
        if (why := self._reads.changed()) is not None:
            return why
        if casting() != self._casting:
            return "autocast around the step changed"
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
