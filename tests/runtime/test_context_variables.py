"""What a step sets in a context variable is undone with all else that a trial of it has done."""

import contextvars
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.reach.undo import Undo, undone
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.program import trace_step

CALLS: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
BARE: contextvars.ContextVar[int] = contextvars.ContextVar("bare")


def counting(model: nn.Module, batch: Tensor) -> Tensor:
    """Its loss grows with each call."""
    CALLS.set(CALLS.get() + 1)
    return model(batch).square().mean() * CALLS.get()


def bare() -> int:
    """Has the variable that was made without a default."""
    return BARE.get()


def made() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), 0.01)


def test_variables_are_put_back() -> None:
    """Those that were set, and those that had their default; what has neither cannot be taken away."""
    context = contextvars.copy_context()

    def changed() -> None:
        before = Undo(counting, bare)
        with undone(counting, bare):
            CALLS.set(5)
            BARE.set(1)
            (change,) = [c for c in before.changes() if "context variable" in c.what]
            assert (change.what, change.before, change.now) == ("the context variable calls", 0, 5)
        assert CALLS.get() == 0
        with undone(counting, bare):
            BARE.set(2)
        assert BARE.get() == 1

    context.run(changed)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_compiled_step_counts_no_trials() -> None:
    """Its check runs the step some times; training begins with what the script has set."""
    torch._dynamo.reset()

    def losses(execution: Any) -> list[float]:
        model, optimizer = made()
        plan = Plan(execution=execution)
        with interpreted(), PlannedStep(model, counting, optimizer, plan, device="cpu") as step:
            return [float(step(torch.ones(3, 4))) for _ in range(4)]

    eager, compiled = (
        contextvars.copy_context().run(losses, execution) for execution in ("eager", "compiled")
    )
    assert compiled == pytest.approx(eager, rel=1e-5)


def test_one_program_refuses_a_step_that_sets_one() -> None:
    """It would never do that again; the variable is named."""

    def traced() -> None:
        model, optimizer = made()
        with pytest.raises(CaptureError, match="that changes the context variable calls in Python"):
            trace_step(model, counting, optimizer, torch.ones(3, 4))
        assert CALLS.get() == 0

    contextvars.copy_context().run(traced)
