"""Calls of an optimizer do what its own do, whoever has put something around them."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad, Adam, Optimizer, lr_scheduler
from torch.optim import optimizer as base

from ridgeline.optimizers.optimizer_calls import clear_gradients, update, update_in_order


def made(kind: Any = Adam) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, kind(model.parameters(), 0.1)


def trained(clear: Callable[[Optimizer], Any], step: Callable[[Optimizer], Any], kind: Any) -> Any:
    model, optimizer = made(kind)
    for _ in range(3):
        clear(optimizer)
        model(torch.ones(4, 3)).square().sum().backward()
        step(optimizer)
    return model.state_dict()


@pytest.mark.parametrize("kind", [Adam, Adagrad, functools.partial(Adam, amsgrad=True)])
def test_they_train_as_the_methods_do(kind: Any) -> None:
    """Bit by bit."""
    mine = trained(clear_gradients, update, kind)
    plain = trained(lambda o: o.zero_grad(set_to_none=True), lambda o: o.step(), kind)
    assert all(torch.equal(mine[name], plain[name]) for name in plain)


def test_gradients_are_none_afterwards() -> None:
    """Those of all groups, also of parameters that had none."""
    model, optimizer = made()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    model(torch.ones(4, 3)).sum().backward()
    clear_gradients(optimizer)
    assert [p.grad for group in optimizer.param_groups for p in group["params"]] == [None] * 3


def wrapped_class(seen: list[str], patch: pytest.MonkeyPatch) -> Optimizer:
    """Somebody has wrapped the method of the class, attributes and all."""
    _, optimizer = made()
    before = Adam.step

    @functools.wraps(before)
    def step(self: Any, *args: Any) -> Any:
        seen.append("step")
        return before(self, *args)

    patch.setattr(Adam, "step", step)
    return optimizer


def scheduled(seen: list[str], patch: pytest.MonkeyPatch) -> Optimizer:
    """A scheduler counts the calls."""
    _, optimizer = made()
    lr_scheduler.ExponentialLR(optimizer, 0.9)
    counting = optimizer.step
    patch.setattr(optimizer, "step", lambda: (seen.append("step"), counting()))
    return optimizer


def hooked(seen: list[str], patch: pytest.MonkeyPatch) -> Optimizer:
    _, optimizer = made()
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    return optimizer


def hooked_globally(seen: list[str], patch: pytest.MonkeyPatch) -> Optimizer:
    handle = base.register_optimizer_step_pre_hook(lambda *_: seen.append("step"))
    patch.setattr(base, "_global_optimizer_pre_hooks", dict(base._global_optimizer_pre_hooks))
    handle.remove()
    return made()[1]


@pytest.mark.parametrize("prepare", [wrapped_class, scheduled, hooked, hooked_globally])
def test_what_is_put_around_a_step_is_called(prepare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrappers, schedulers and hooks."""
    seen: list[str] = []
    optimizer = prepare(seen, monkeypatch)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    update(optimizer)
    assert seen == ["step"]


def test_a_method_of_ones_own_clears_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a subclass, in the object, or in torch's class itself."""

    class Own(Adam):
        def zero_grad(self, set_to_none: bool = True) -> None:
            seen.append("subclass")

    seen: list[str] = []
    _, own = made(Own)
    clear_gradients(own)
    _, plain = made()
    monkeypatch.setattr(plain, "zero_grad", lambda **_: seen.append("object"))
    clear_gradients(plain)
    monkeypatch.setattr(Optimizer, "zero_grad", lambda *_, **__: seen.append("torch"))
    clear_gradients(made()[1])
    assert seen == ["subclass", "object", "torch"]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # as 2.11 always says
def test_a_profiler_sees_the_calls() -> None:
    """Under the names that torch gives them."""
    model, optimizer = made()
    model(torch.ones(4, 3)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        update(optimizer)
        clear_gradients(optimizer)
    names = {event.key for event in profile.key_averages()}
    assert {"Optimizer.step#Adam.step", "Optimizer.zero_grad#Adam.zero_grad"} <= names


class Asking(Optimizer):
    """Notes whether it is asked for deterministic algorithms; raises if `fails`."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.fails = fails
        self.asked: list[bool] = []

    def step(self, closure: Any = None) -> None:
        self.asked.append(torch.are_deterministic_algorithms_enabled())
        if self.fails:
            raise RuntimeError("as it was told")


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("mode", "only_warns"), [(False, False), (True, True), (True, False)])
def test_updates_in_order_are_deterministic(mode: bool, only_warns: bool, fails: bool) -> None:
    """Inside alone, and what the user asked for stands behind them, also where one raises."""
    optimizer = Asking(fails=fails)
    torch.use_deterministic_algorithms(mode, warn_only=only_warns)
    try:
        with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
            update_in_order(optimizer)
        assert optimizer.asked == [True]
        assert torch.are_deterministic_algorithms_enabled() is mode
        assert torch.is_deterministic_algorithms_warn_only_enabled() is only_warns
    finally:
        torch.use_deterministic_algorithms(False)
