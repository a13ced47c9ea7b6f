"""Classes and functions that change in ways torch's compiler does not look for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from adversary.interpreting import interpreted


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).tanh()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        return x * 2.0 if float(x.sum()) > 0 else x + 1.0


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    with interpreted():
        yield


def test_another_method_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a branch on data makes the compiler read in several pieces, with nothing but its own guards."""
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(3, 4)
    with torch.no_grad():
        fast = rl.hybridize(model, (x,), mode="compiled")
        torch.testing.assert_close(fast(x), model(x))
        monkeypatch.setattr(Part, "forward", lambda part, x: part.lin(x).relu())
        torch.testing.assert_close(fast(x), model(x))


def scaled(x: Tensor) -> Tensor:
    """What it multiplies by may be put on it."""
    return x * getattr(scaled, "by", 1.0)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self.lin(x))


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # it is only interpreted
@pytest.mark.parametrize("execution", ["compiled", "regional", "step-graph"])
def test_attributes_put_on_functions_are_read(
    execution: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ones, others, and none again."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Scaling(), Scaling()), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def mean(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    with rl.TrainStep(model, mean, optimizer, rl.Plan(execution=execution), device="cpu") as step:
        for by in (None, None, 3.0, 2.0, None):
            if by is None:
                monkeypatch.delattr(scaled, "by", raising=False)
            else:
                monkeypatch.setattr(scaled, "by", by, raising=False)
            for _ in range(2):
                torch.testing.assert_close(step(x), mean(model, x).detach())


class Chain(nn.Module):
    """Layers one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last: nn.Module = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.last(x)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # it is only interpreted
def test_weights_are_tied_where_others_are_gone() -> None:
    """The compiler, asked why it compiles anew, looks for all parameters that it knew, and misses some."""
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    parts: Any = model.parts

    def parametrize() -> None:
        nn.utils.parametrize.register_parametrization(model.last, "bias", nn.Tanh())

    def tie() -> None:
        parts[1].weight = parts[0].weight

    def replace() -> None:
        model.last = nn.Sequential(model.last, nn.Tanh())

    def mean(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    with rl.TrainStep(model, mean, optimizer, rl.Plan(execution="compiled"), device="cpu") as step:
        for change in (lambda: None, parametrize, tie, replace):
            change()
            for _ in range(2):
                torch.testing.assert_close(step(x), mean(model, x).detach())


def test_names_that_a_class_of_pythons_hides_are_left_alone() -> None:
    """What the compiler looks up in functions (as `jacrev` has it do) may not be there in their class."""
    torch.manual_seed(0)
    model, x = Part(), torch.randn(3, 4)

    def jacobian(x: Tensor) -> Tensor:
        return torch.vmap(torch.func.jacrev(model))(x)

    with torch.no_grad():
        fast = rl.hybridize(jacobian, (x,), mode="compiled")
        torch.testing.assert_close(fast(x), jacobian(x))
