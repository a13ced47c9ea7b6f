"""Steps that a script has the optimizer take itself, after a training step that leaves it no gradients.

A plain loop leaves gradients in `.grad`, so that a second `optimizer.step()` applies them again. Where one
program holds them, or each worker has those of its part alone, such a call would find none and do nothing.
"""

from typing import Any

from torch.optim import Optimizer

from ridgeline.errors import WorkloadError
from ridgeline.optimizers.groups import parameters_of

_HOOKS = "_optimizer_step_pre_hooks"
_KEY = "ridgeline: no gradients"
"""Of the hook among those before the optimizer's step; it stays there between training steps only."""


class StepAlone:
    """Refuses steps of an optimizer without any gradient.

    Args:
        optimizer: Of the training step.
        why: Where its gradients are, for messages.
    """

    def __init__(self, optimizer: Optimizer, why: str) -> None:
        self._optimizer = optimizer
        self._why = why

    def forbid(self) -> None:
        """From now on, until the next training step with this optimizer."""
        hooks: Any = vars(self._optimizer).get(_HOOKS)
        if hooks is not None:  # an optimizer of the user's own may have none
            hooks[_KEY] = self._refuse

    def _refuse(self, optimizer: Optimizer, *_: object) -> None:
        if all(parameter.grad is None for parameter in parameters_of(optimizer)):
            raise WorkloadError(
                f"wanted gradients for {type(optimizer).__name__}.step(), called between two training steps, "
                f"got none in any parameter: {self._why}; compute some with backward() before, or train with "
                "execution='eager' on all-reduce, which leaves those of the last step in `.grad`"
            )


def allow_alone(optimizer: Optimizer) -> None:
    """A training step begins, or is made or closed: its optimizer steps as it likes."""
    hooks: Any = vars(optimizer).get(_HOOKS)
    if hooks:
        hooks.pop(_KEY, None)
