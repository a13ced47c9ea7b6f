"""Hooks behind an optimizer's step, called once all parameters are what the step makes of them.

Where something else than the worker's own optimizer brings the whole update (other workers, a store), some
parameters are old when `optimizer.step()` returns: an average of weights that a hook makes there would be of
half a step. So such hooks are held until the update is whole.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from ridgeline.errors import WorkloadError
from ridgeline.optimizers.step_hooks import emptied, replaced_methods, step_hooks


class LateHooks:
    """Holds the hooks behind the steps of an optimizer.

    Args:
        optimizer: Of the step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._held = contextlib.ExitStack()
        self._hooks: list[Callable[..., object]] = []
        self._calls: list[tuple[Any, Any]] = []

    def hold(self) -> None:
        """The optimizer's next step calls none of them."""
        own: Any = vars(self._optimizer).get("_optimizer_step_post_hooks", {})
        # In the order in which torch calls them.
        self._hooks = [*own.values(), *_global_optimizer_post_hooks.values()]
        if not self._hooks:
            return
        self._held.enter_context(emptied([own, _global_optimizer_post_hooks]))
        # Tells whether there was a step, and of what: one that is left out has no hooks.
        own[id(self)] = self._note

    def call(self) -> None:
        """The update is whole: give them back, and call them where the optimizer took a step."""
        calls, hooks = self._calls, self._hooks
        self.drop()
        for args, kwargs in calls:
            for hook in hooks:
                hook(self._optimizer, args, kwargs)

    def drop(self) -> None:
        """Give them back; those of a step that failed are not called."""
        vars(self._optimizer).get("_optimizer_step_post_hooks", {}).pop(id(self), None)
        self._held.close()
        self._calls, self._hooks = list[tuple[Any, Any]](), list[Callable[..., object]]()

    def _note(self, _: Optimizer, args: Any, kwargs: Any) -> None:
        self._calls.append((args, kwargs))


def check_step_is_plain(optimizer: Optimizer, algorithm: str, why: str) -> None:
    """Refuse hooks before the optimizer's step, and methods in its place, which would not find all gradients.

    Args:
        optimizer: Of the step.
        algorithm: Of the plan, for messages.
        why: What becomes of its updates.

    Raises:
        WorkloadError: there are some.
    """
    own = __name__.partition(".")[0]  # ours refuse to continue from what a closed step took along
    before, _, before_all, _ = step_hooks(optimizer)
    hooks = (*before.values(), *before_all.values())
    if any(_module(hook).partition(".")[0] != own for hook in hooks):
        raise WorkloadError(
            f"wanted an optimizer without hooks before its step for sync.algorithm={algorithm!r}, {why}, got "
            f"{type(optimizer).__name__} with some; remove them, or use another algorithm"
        )
    if "step" in replaced_methods(optimizer):
        raise WorkloadError(
            f"wanted an optimizer with the step of its class for sync.algorithm={algorithm!r}, {why}, got "
            f"{type(optimizer).__name__} with another method in its place; leave it as it is, or use another "
            "algorithm"
        )


def _module(hook: Any) -> str:
    """Where the code of a hook is from; a bound method has that of its function."""
    return str(getattr(hook, "__module__", None))
