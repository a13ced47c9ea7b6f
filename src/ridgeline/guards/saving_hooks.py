"""Hooks on saved tensors, as a program that is read finds them."""

from torch import fx
from torch._guards import Guard

from ridgeline.capture.capturing import SAVED_TENSORS_HOOKS


def reads_saving_hooks() -> bool:
    """Whether there are some that the compiler takes into a program: graphs of its own."""
    hooks = SAVED_TENSORS_HOOKS(True)
    return hooks is not None and all(isinstance(hook, fx.GraphModule) for hook in hooks)


def is_of_saving(guard: Guard) -> bool:
    """Whether a guard is the compiler's own look at them."""
    return guard.create_fn_name() == "AUTOGRAD_SAVED_TENSORS_HOOKS"
