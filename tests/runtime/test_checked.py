"""A compiled step after its check: what the compiler cannot do later runs as it was written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx

from adversary.interpreting import interpreted
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs import checked
from ridgeline.runtime.steps.graphs.checked import AS_WRITTEN, OF_OTHERS
from ridgeline.runtime.steps.step import PlannedStep


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


class Block(nn.Module):
    """Occurs twice, so that there are regions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


class Counting:
    """A loss that does something in Python before a part that is compiled."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.calls += 1
        torch._dynamo.graph_break()
        return mean_square(model, batch)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", ["compiled", "regional"])
@pytest.mark.parametrize("make", [lambda: mean_square, Counting], ids=["at once", "half-way"])
def test_what_a_compiler_fails_on_later_runs_as_written(
    execution: Execution, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step of another shape: a half of it had run before the error, and ran again under another plan."""

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Argument 's77' was used before it has been defined")

    torch._dynamo.reset()  # it leaves functions alone that it has failed on
    ends = []
    for name in ("eager", execution):
        torch.manual_seed(0)
        model, loss_fn = nn.Sequential(Block(), Block()), make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        plan = Plan(execution=name)
        with interpreted(), PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
            losses = [step(torch.randn(5, 4))]
            with monkeypatch.context() as patch:
                patch.setattr(compile_fx, "fx_codegen_and_compile", failing)
                losses += [step(torch.randn(rows, 4)) for rows in (6, 5, 7)]
            assert (AS_WRITTEN in step.notes) == (name != "eager")
        assert getattr(loss_fn, "calls", 4) == 4
        ends.append([*losses, *model.state_dict().values()])
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs)


def alike(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of pairs that are one tensor another loss, as of a tied input and target."""
    first, second = batch
    scale = 2.0 if first is second else 1.0
    return scale * (model(first) - second).square().mean()


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_tensor_that_stands_twice_in_a_batch_is_one_when_it_is_checked() -> None:
    """The check is of what trains: nothing is compiled anew for the step behind it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(execution="compiled")
    with interpreted(), PlannedStep(model, alike, optimizer, plan, device="cpu") as step:
        for _ in range(3):
            batch = torch.randn(5, 4)
            wanted = alike(model, (batch, batch)).detach()
            torch.testing.assert_close(step((batch, batch)), wanted)
        assert "recompiles" not in step.timeline().counters


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_no_worker_checks_while_another_one_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mode sees the first step of that one, its exchanges would meet those of the check."""
    others, checks = [1.0, 0.0], []
    monkeypatch.setattr(checked, "largest_of_workers", lambda mine, _: max(mine, others.pop(0)))
    monkeypatch.setattr(checked, "check_compiled", lambda *_: checks.append(len(others)))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(execution="compiled")
    with interpreted(), PlannedStep(model, mean_square, optimizer, plan, device="cpu") as step:
        for _ in range(3):
            step(torch.randn(5, 4))
        assert OF_OTHERS in step.notes
    assert checks == [0]
