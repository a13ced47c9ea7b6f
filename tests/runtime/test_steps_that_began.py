"""A step that has begun is not taken again: what refuses a captured model refuses the next step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError, ObstacleError, WorkloadError
from ridgeline.model_graphs.form import REFUSED
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.session import TrainStep

CHANGED = 5
"""The step before which the model changes."""


class Student(nn.Module):
    """Looks at a value on the host where it is told to, and so cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out, self.looks = nn.BatchNorm1d(4), nn.Linear(4, 2), False

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(self.norm(x))
        return out * float(out.detach().max().item() > -100) if self.looks else out


class Distilling:
    """Counts its calls, and runs a teacher with statistics of its own."""

    def __init__(self) -> None:
        self.num_calls, self.teacher = 0, nn.BatchNorm1d(4)
        self.leaves_out: set[int] = set()
        self.retains: set[int] = set()

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.num_calls += 1
        wanted = self.teacher(batch).mean().detach()
        if self.num_calls in self.leaves_out:
            return model.out(batch).square().mean() + wanted
        loss = model(batch).square().mean()
        if self.num_calls in self.retains:
            hidden = vars(torch.autograd)["grad"]
            hidden(loss, [model.out.bias], None, True)
        return (loss + wanted) * (1.0 if float(loss.detach()) > -1.0 else 2.0)


def batch_of(number: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(number))


def state(model: Student, loss_fn: Distilling) -> list[Any]:
    return [*model.state_dict().values(), *loss_fn.teacher.state_dict().values()]


def make() -> tuple[Student, Distilling, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Student()
    return model, Distilling(), torch.optim.SGD(model.parameters(), 0.1)


def trained(execution: Execution) -> tuple[list[Any], int, list[int]]:
    """State and count after steps of which one meets a changed model; the count when another plan took over."""
    model, loss_fn, optimizer = make()
    counts: list[int] = []
    with emulated_graphs():
        step = TrainStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu")

        def take_next_best(error: Exception) -> bool:
            counts.append(loss_fn.num_calls)
            step._step.close()
            step._step = step._planned(Plan())
            return True

        step._takes_next_best = take_next_best
        with step:
            for number in range(8):
                model.looks = number >= CHANGED
                step(batch_of(number))
    return state(model, loss_fn), loss_fn.num_calls, counts


def test_a_model_that_cannot_be_captured_again_changes_the_plan_between_two_steps() -> None:
    """The loss and the teacher had run twice on the batch at which it was noticed."""
    wanted, got = trained("eager"), trained("model-graph")
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)
    assert (got[1], wanted[1]) == (8, 8)
    assert got[2] == [CHANGED + 1]


def test_without_another_plan_the_step_after_it_is_refused_before_it_begins() -> None:
    """Each one, also once an error was caught."""
    model, loss_fn, optimizer = make()
    plan = Plan(execution="model-graph")
    with emulated_graphs(), PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        for number in range(CHANGED + 1):
            model.looks = number == CHANGED
            step(batch_of(number))
        assert REFUSED in step.notes
        before = [value.clone() for value in state(model, loss_fn)]
        for _ in range(2):
            with pytest.raises(ObstacleError, match="got 1 obstacle"):
                step(batch_of(9))
    torch.testing.assert_close(state(model, loss_fn), before, rtol=0, atol=0)
    assert loss_fn.num_calls == CHANGED + 1


def test_a_loss_may_leave_the_model_out_in_some_steps() -> None:
    """The step has run by then."""
    ends = []
    for execution in ("eager", "model-graph"):
        model, loss_fn, optimizer = make()
        plan = Plan(execution=execution)
        with emulated_graphs(), PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
            for number in range(6):
                step(batch_of(number))
                loss_fn.leaves_out = {5}
        ends.append(state(model, loss_fn))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


def test_what_fails_within_a_step_ends_training() -> None:
    """Instead of another plan, which would take the step again."""
    model, loss_fn, optimizer = make()
    plan = Plan(execution="model-graph")
    with emulated_graphs(), PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        for number in range(3):
            step(batch_of(number))
        loss_fn.retains = {4}
        with pytest.raises(
            WorkloadError, match=r"execution='eager'\. A part of this step has run"
        ) as it:
            step(batch_of(3))
    assert not isinstance(it.value, CaptureError)
    assert loss_fn.num_calls == 4
