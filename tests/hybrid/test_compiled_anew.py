"""What compiled steps are compiled anew for: code, types and parameters that change after the first step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
"""An interpreter is none."""


@pytest.fixture(autouse=True)
def no_code() -> Iterator[None]:
    """Programs run operator by operator, since what is asked are their guards."""
    with interpreted():
        yield


class Block(nn.Module):
    """A block as a model repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_a_method_that_is_replaced_in_a_class_is_compiled_anew(
    execution: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced in the class of a block, then overridden in a class that inherited it."""

    class Heir(Block):
        pass

    torch.manual_seed(0)
    model = nn.Sequential(Heir(), Heir())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(4, 8)

    def half(self: Block, x: Tensor) -> Tensor:
        return self.linear(x) / 2

    def none(self: Block, x: Tensor) -> Tensor:
        return self.linear(x) * 0

    def mean(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    plan = Plan(execution=execution)
    with PlannedStep(model, mean, optimizer, plan, device="cpu") as step:
        for kind, method in ((None, None), (Block, half), (Heir, none), (Heir, half)):
            if kind is not None:
                monkeypatch.setattr(kind, "forward", method, raising=False)
            torch.testing.assert_close(step(x), mean(model, x).detach())


def scaled(loss: Tensor, by: float = 1.0) -> Tensor:
    return loss * by


@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_a_dtype_changed_in_place_and_another_default_are_compiled_anew(
    execution: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of torch differ in what of these they guard unless told to."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(4, 8)

    def mean(model: nn.Module, x: Tensor) -> Tensor:
        return scaled(model(x.to(model[0].linear.weight.dtype)).square().mean())

    with PlannedStep(model, mean, optimizer, Plan(execution=execution), device="cpu") as step:
        for change in (lambda: None, lambda: None, model.double, model.float):
            change()
            torch.testing.assert_close(step(x), mean(model, x).detach())
        monkeypatch.setattr(scaled, "__defaults__", (3.0,))
        torch.testing.assert_close(step(x), mean(model, x).detach())


class Penalised(nn.Module):
    """A block whose parameters count, each once, in what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return self.second(torch.tanh(self.first(x))) + penalty


@pytest.mark.parametrize("execution", ["compiled", "regional"])
def test_weights_that_are_tied_and_untied_later_are_compiled_anew(execution: Any) -> None:
    """By default torch's compiler takes parameters that were two for two ever after."""
    torch.manual_seed(0)
    model = nn.Sequential(Penalised(), Penalised())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(4, 8)
    block: Any = model[0]

    def mean(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def tie() -> None:
        block.second.weight = block.first.weight

    def untie() -> None:
        block.second.weight = nn.Parameter(torch.eye(8))

    with PlannedStep(model, mean, optimizer, Plan(execution=execution), device="cpu") as step:
        for change in (lambda: None, tie, untie, tie):
            change()
            torch.testing.assert_close(step(x), mean(model, x).detach())
