"""Optimizers that torch has not written: their steps in one program, or who refuses it and where."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.errors import CaptureError
from ridgeline.runtime.steps.whole_step.program import StepProgram, trace_step


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def trained(make: Callable[[nn.Module], Optimizer]) -> tuple[nn.Module, Optimizer]:
    """Model and optimizer after their first step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model)
    eager_step(model, optimizer, batch_of(0))
    return model, optimizer


def batch_of(index: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(index))


def eager_step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    optimizer.step()


def program_of(make: Callable[[nn.Module], Optimizer]) -> StepProgram:
    model, optimizer = trained(make)
    return trace_step(model, loss_fn, optimizer, batch_of(0))


class Listed(Optimizer):
    """Has the learning rate as a number of operators on lists of tensors."""

    def __init__(self, params: Any, form: str) -> None:
        super().__init__(params, {"lr": 0.05})
        self.form = form

    def step(self, closure: Any = None) -> None:
        """One update; torch's operators on lists write into the first of their arguments."""
        for group in self.param_groups:
            rate = group["lr"]
            parameters = list(group["params"])
            gradients = [p.grad for p in parameters]
            ones = [torch.full_like(g, 2.0) for g in gradients]
            with torch.no_grad():
                if self.form == "add_":
                    torch._foreach_add_(parameters, gradients, alpha=-rate)
                elif self.form == "sub_":
                    torch._foreach_sub_(parameters, gradients, alpha=rate)
                elif self.form == "addcmul_":
                    torch._foreach_addcmul_(parameters, gradients, ones, value=-rate)
                elif self.form == "addcdiv_":
                    torch._foreach_addcdiv_(parameters, gradients, ones, value=-rate)
                elif self.form == "add":
                    found = torch._foreach_add(parameters, gradients, alpha=-rate)
                    torch._foreach_copy_(parameters, found)
                else:
                    found = torch._foreach_addcdiv(parameters, gradients, ones, value=-rate)
                    torch._foreach_copy_(parameters, found)


@pytest.mark.parametrize("form", ["add_", "sub_", "addcmul_", "addcdiv_", "add", "addcdiv"])
def test_a_learning_rate_is_a_number_of_operators_on_lists(form: str) -> None:
    """And the program follows it, in the parameters' own type."""
    program = program_of(lambda model: Listed(model.parameters(), form))
    model, optimizer = trained(lambda model: Listed(model.parameters(), form))
    mine = program.lifted.model
    for index, rate in enumerate((0.05, 0.05, 0.3), start=1):
        program.lifted.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = rate
        program.lifted.rates.refresh()
        program.run([batch_of(index)])
        eager_step(model, optimizer, batch_of(index))
        for (name, wanted), got in zip(model.named_parameters(), mine.parameters(), strict=True):
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted, msg=lambda text, name=name: f"{name}: {text}")


class Choosy(Optimizer):
    """Has torch's names for settings, and a form for one tensor after the other only."""

    def __init__(self, params: Any, foreach: bool | None) -> None:
        super().__init__(params, {"lr": 0.05, "foreach": foreach, "capturable": False})

    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            if group["foreach"] or (group["foreach"] is None and group["capturable"]):
                raise NotImplementedError("no form for lists.")
            with torch.no_grad():
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("foreach", [None, False])
def test_the_form_for_lists_is_torchs_own(foreach: bool | None) -> None:
    """Others may not have written it; the settings are put back."""
    program = program_of(lambda model: Choosy(model.parameters(), foreach))
    model, optimizer = trained(lambda model: Choosy(model.parameters(), foreach))
    program.run([batch_of(1)])
    eager_step(model, optimizer, batch_of(1))
    torch.testing.assert_close(program.lifted.model.state_dict(), dict(model.state_dict()))
    assert program.lifted.optimizer.param_groups[0]["foreach"] is foreach
    assert program.lifted.optimizer.param_groups[0]["capturable"] is False


class Picky(Choosy):
    """Takes no setting but those that it was given."""

    def step(self, closure: Any = None) -> None:
        """One update."""
        assert not self.param_groups[0]["capturable"], "not on this device."
        super().step(closure)


def test_who_does_not_take_the_settings_of_a_program_is_named() -> None:
    """With the line, and modes that leave the optimizer as it is."""
    wanted = re.compile(
        r"wanted an optimizer whose step can be written as one program, got AssertionError: not on this device, "
        r"in Picky\.step\(\) at test_optimizers_of_others\.py:\d+ in step; use execution='compiled' or 'eager'$"
    )
    with pytest.raises(CaptureError, match=wanted):
        program_of(lambda model: Picky(model.parameters(), None))


def test_a_value_that_an_optimizer_of_torch_reads_is_named() -> None:
    """By a line of the optimizer, and not of what stands in for values."""
    wanted = re.compile(
        r"wanted an optimizer whose step can be written as one program, got a number or a branch that depends "
        r"on the values of tensors, in Adafactor\.step\(\) at _adafactor\.py:\d+ in \w+; use "
        r"execution='compiled' or 'eager'$"
    )
    with pytest.raises(CaptureError, match=wanted):
        program_of(lambda model: torch.optim.Adafactor(model.parameters()))
