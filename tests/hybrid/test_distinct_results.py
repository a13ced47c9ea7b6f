"""Tensors that a compiled program leaves under several names share what they share in the code, and no more."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.plan import Execution, Plan
from ridgeline.programs import inductor
from ridgeline.programs.distinct_results import kept_distinct
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")

KEPT: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "copies": lambda y: (y.clone(), y.clone()),
    "copies without gradients": lambda y: (y.detach().clone(), y.detach().clone(), y.detach()),
    "another object": lambda y: (y.detach(), y.detach(), y.detach().float()),
    "views": lambda y: (y.detach()[:], y.detach().expand(3, 4), y.detach()[0]),
    "the result": lambda y: (y, y.view_as(y), y.detach().clone()),
}


class Keeping(nn.Module):
    """Keeps what a function makes of its hidden state."""

    def __init__(self, make: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.hidden, self.out, self.make = nn.Linear(4, 4), nn.Linear(4, 4), make
        self.kept: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        y = self.hidden(x).tanh()
        self.kept = self.make(y)
        return self.out(y)


def relations(tensors: tuple[Tensor, ...]) -> list[tuple[bool, bool]]:
    """Of each pair: whether it is one object, and one memory."""
    return [
        (a is b, a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
        for a in tensors
        for b in tensors
    ]


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_results_are_one_where_they_are_in_the_code(
    kept: str, is_replayed: bool, is_training: bool
) -> None:
    torch.manual_seed(0)
    model, x = Keeping(KEPT[kept]), torch.randn(3, 4)
    arguments = inductor.replayed_arguments([]) if is_replayed else inductor.plain_arguments()
    with interpreted(), torch.set_grad_enabled(is_training):
        compiled = torch.compile(model, **arguments)
        for _ in range(2):
            found = compiled(x), *model.kept
            wanted = model(x), *model.kept
            assert relations(found) == relations(wanted)
            torch.testing.assert_close(found, wanted)
            assert [t.requires_grad for t in found] == [t.requires_grad for t in wanted]
            assert [t.stride() for t in found] == [t.stride() for t in wanted]
    torch._dynamo.reset()  # models of one class share what was compiled


class Averaging(nn.Module):
    """Shows what it saw, and writes into an average that began as a copy of the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shown: Any = None
        self.average: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        if self.average is None:
            self.average = y.detach().clone()
            self.shown = y.detach().clone()
        else:
            self.average.lerp_(y.detach(), 0.5)
        return y - self.shown


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_a_copy_is_not_written_with_another(execution: Execution) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(Averaging(), Averaging())]
    models.append(copy.deepcopy(models[0]))
    batches = [torch.randn(3, 4) for _ in range(4)]
    for model, name in zip(models, ("eager", execution), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = Plan(execution=name)
        with interpreted(), PlannedStep(model, loss_of, optimizer, plan, device="cpu") as step:
            for x in batches:
                step(x)
    found = [[(m.shown, m.average, m.linear.weight) for m in model] for model in models]
    torch.testing.assert_close(*found)


def test_a_program_of_one_result_is_left_alone() -> None:
    def compiled() -> tuple[int]:
        return (1,)

    assert kept_distinct(compiled, [5, None]) is compiled
