"""Python code of others around an optimizer's steps: hooks, and methods put in the place of its own."""

import contextlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def step_hooks(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Where torch keeps the hooks of `step()`: the optimizer's own, and those of all optimizers."""
    own = (
        vars(optimizer).get(name, {})
        for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    )
    return [*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def replaced_methods(optimizer: Optimizer) -> tuple[str, ...]:
    """Which of the methods that a training step calls were put on the optimizer itself.

    What a scheduler puts there counts calls for a warning, and is none of them.
    """
    own = {name: vars(optimizer).get(name) for name in ("step", "zero_grad")}
    return tuple(
        name
        for name, method in own.items()
        if method is not None and _below(method) is not getattr(type(optimizer), name)
    )


def tell_schedulers(optimizer: Optimizer) -> None:
    """Note that a step was taken, also by a program, which calls no `step()` that a scheduler could count.

    For one around whose `step` a scheduler has put something. Source: torch/optim/lr_scheduler.py of torch
    2.11 to 2.13: that sets this, and the first step of the scheduler warns of a wrong order without it.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001


def _below(method: Any) -> Any:
    """The function of a bound method, or that inside of a wrapper."""
    return getattr(method, "__func__", getattr(method, "__wrapped__", None))


def without_step_hooks(optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    """Steps inside call no hooks: they are trials, and an average of weights must not see them."""
    return emptied(step_hooks(optimizer))


@contextlib.contextmanager
def emptied(stores: Sequence[MutableMapping[Any, Any]]) -> Iterator[None]:
    """Dictionaries of hooks are empty inside; whoever holds one holds it still."""
    # Emptied in place, as torch holds the dictionaries themselves in closures and nodes.
    kept = [dict(store) for store in stores]
    for store in stores:
        store.clear()
    try:
        yield
    finally:
        for store, hooks in zip(stores, kept, strict=True):
            store.update(hooks)
