"""Hooks beside a step that is checked, or one program: called as plain PyTorch does, or refused."""

import functools
from typing import Any

import pytest
import torch
from step_pairs import STEP_GRAPH, adamw, batch_of, loss_fn, make, pair_of, sgd
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.programs import compiling
from ridgeline.runtime.steps.step import PlannedStep

OF_OPTIMIZER = (
    "wanted an optimizer without step hooks, since one program for the whole step cannot call them, got 1 "
    "around AdamW.step(); clip gradients by clip_norm and do other work after each training step, or use "
    "execution='compiled' or 'eager'"
)
OF_GRADIENT = (
    "wanted parameters without gradient hooks, since gradients stay inside the program of a whole step, got a "
    "hook on '0.weight'; remove it, or use execution='compiled' or 'eager'"
)


def on_optimizer(step: PlannedStep) -> Any:
    return step.optimizer.register_step_post_hook(lambda *_: None)


def on_all_optimizers(_: PlannedStep) -> Any:
    return register_optimizer_step_post_hook(lambda *_: None)


def on_gradient(step: PlannedStep) -> Any:
    return step.model.get_parameter("0.weight").register_hook(lambda gradient: gradient * 0)


def on_accumulation(step: PlannedStep) -> Any:
    weight: Any = step.model.get_parameter("0.weight")
    return weight.register_post_accumulate_grad_hook(lambda _: None)


REFUSED = {
    on_optimizer: OF_OPTIMIZER,
    on_all_optimizers: OF_OPTIMIZER,
    on_gradient: OF_GRADIENT,
    on_accumulation: OF_GRADIENT,
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("register", REFUSED, ids=lambda register: register.__name__)
@pytest.mark.parametrize("late", [False, True])
def test_hooks_that_no_program_calls_are_refused(register: Any, late: bool) -> None:
    """Whether they are there before the trace or come later; without them training goes on."""
    model = make()
    with PlannedStep(model, loss_fn, adamw(model), STEP_GRAPH, device="cpu") as step:
        for index in range(3 if late else 0):
            step(batch_of(index))
        handle = register(step)
        try:
            step(batch_of(3))
            with pytest.raises(CaptureError) as caught:
                step(batch_of(4))
            assert str(caught.value) == REFUSED[register]
        finally:
            handle.remove()
        for index in range(5, 8):
            step(batch_of(index))
        assert step._runner._prepared


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", ["step", "zero_grad"])
@pytest.mark.parametrize("late", [False, True])
def test_methods_put_on_the_optimizer_are_refused(name: str, late: bool) -> None:
    """No program calls them. What a scheduler puts there only counts calls, and is let through."""
    model = make()
    optimizer = adamw(model)
    with PlannedStep(model, loss_fn, optimizer, STEP_GRAPH, device="cpu") as step:
        for index in range(3 if late else 0):
            step(batch_of(index))
        own = getattr(optimizer, name)
        setattr(optimizer, name, functools.partial(own))
        step(batch_of(3))
        with pytest.raises(
            CaptureError, match=rf"the {name}\(\) of its class, .* put on AdamW; do"
        ):
            step(batch_of(4))
        setattr(optimizer, name, own)  # as somebody does who puts it back
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for index in range(5, 8):
            step(batch_of(index))
        assert step._runner._prepared


@pytest.mark.usefixtures("interpreted")
def test_a_step_that_is_replaced_in_the_class_is_traced_anew() -> None:
    """It trains as the eager step does after it."""

    class Own(torch.optim.SGD):
        pass

    def doubled(self: Own, closure: Any = None) -> None:
        for _ in range(2):
            torch.optim.SGD.step(self, closure)

    with pair_of(optimizer=lambda model: Own(model.parameters(), 0.05)) as pair:
        pair.train(8, {3: lambda _: setattr(Own, "step", doubled)})
        assert pair.program._runner._prepared


class Average:
    """An average of the weights, kept by a hook of the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.weights = [p.detach().clone() for p in model.parameters()]
        self.calls = 0
        optimizer.register_step_post_hook(self.update)

    def update(self, *_: Any) -> None:
        self.calls += 1
        with torch.no_grad():
            for mine, theirs in zip(self.weights, self.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)


def test_trial_steps_call_no_hooks_of_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check's own steps stay out of an average of weights: as many calls and the same as eagerly."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    averages = []
    for plan in (Plan(execution="compiled"), Plan()):
        model = make(dropout=0.0)
        optimizer = adamw(model)
        averages.append(Average(model, optimizer))
        with PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
            for index in range(4):
                step(batch_of(index))
    assert [average.calls for average in averages] == [4, 4]
    torch.testing.assert_close(averages[0].weights, averages[1].weights)


def double(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    return output * 2


@pytest.mark.usefixtures("interpreted")
def test_module_hooks_that_come_and_go_are_seen() -> None:
    """A forward hook is part of the program; added, swapped for another, or removed, it compiles again."""
    handles: dict[PlannedStep, Any] = {}

    def add(step: PlannedStep) -> None:
        handles[step] = step.model.get_submodule("4").register_forward_hook(double)

    def swap(step: PlannedStep) -> None:
        handles[step].remove()
        handles[step] = step.model.get_submodule("4").register_forward_pre_hook(
            lambda _module, inputs: (inputs[0] * 3,)
        )

    def remove(step: PlannedStep) -> None:
        handles[step].remove()

    with pair_of(optimizer=sgd) as pair:
        pair.train(12, {3: add, 6: swap, 9: remove})
        assert pair.counters()["recaptures"] == 3
        assert "compiled again because hooks were added or removed" in pair.program.notes


def test_the_compiler_guards_on_hooks_of_modules() -> None:
    """Its default trusts that no hook comes later; steps change that for themselves only."""
    before = compiling._limits.skip_nnmodule_hook_guards
    with compiling.many_variants():
        assert not compiling._limits.skip_nnmodule_hook_guards
    assert compiling._limits.skip_nnmodule_hook_guards == before


def test_a_forward_hook_added_to_a_compiled_step_is_called() -> None:
    """The compiled step trains like the eager one before and after."""
    finals = []
    for plan in (Plan(execution="compiled"), Plan()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        with PlannedStep(model, loss_fn, sgd(model), plan, device="cpu") as step:
            for index in range(4):
                if index == 2:
                    model[0].register_forward_hook(double)
                step(batch_of(index))
        finals.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*finals)
