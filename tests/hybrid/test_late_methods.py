"""Special methods, and bases, that a class gets after steps were made: programs answer as Python does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import variables

from adversary.interpreting import interpreted
from ridgeline.callables.calls.reads import CallReads
from ridgeline.guards.reading import UnreadableError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")


class Kinds:
    """Classes of one case, which may change them."""

    def __init__(self) -> None:
        class Base:
            def by(self) -> float:
                return 2.0

        class Thing(Base):
            pass

        class Several(tuple[int, ...]):
            pass

        class Table(dict[str, float]):
            pass

        self.base, self.thing, self.several, self.table = Base, Thing, Several, Table


def _or_one(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except (TypeError, KeyError):
        return 1.0


class Net(nn.Module):
    """Scales by what it finds."""

    def __init__(self, asks: Callable[["Net"], Any], kinds: Kinds) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.thing, self.several, self.table = kinds.thing(), kinds.several((1, 2)), kinds.table()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        """Scaled."""
        return self.linear(x) * self.asks(self)


class OtherBase:
    """Answers otherwise."""

    def by(self) -> float:
        return 5.0


def _given(kind: str, name: str, method: Callable[..., Any]) -> Callable[[Kinds], None]:
    return lambda kinds: setattr(getattr(kinds, kind), name, method)


CASES: dict[str, tuple[Callable[[Net], Any], Callable[[Kinds], None]]] = {
    "__len__": (
        lambda m: 2.0 if m.thing else 3.0,
        _given("thing", "__len__", lambda _: 0),
    ),
    "inherited": (
        lambda m: 2.0 if m.thing else 3.0,
        _given("base", "__bool__", lambda _: False),
    ),
    "__contains__": (
        lambda m: _or_one(lambda: 2.0 if 3 in m.thing else 4.0),
        _given("thing", "__contains__", lambda *_: True),
    ),
    "__add__": (
        lambda m: _or_one(lambda: m.thing + 1),
        _given("thing", "__add__", lambda *_: 3.0),
    ),
    "__getitem__": (
        lambda m: _or_one(lambda: m.thing[0]),
        _given("thing", "__getitem__", lambda *_: 3.0),
    ),
    "__float__": (
        lambda m: _or_one(lambda: float(m.thing)),
        _given("thing", "__float__", lambda *_: 3.0),
    ),
    "__lt__": (
        lambda m: _or_one(lambda: 2.0 if m.thing < 3 else 3.0),
        _given("thing", "__lt__", lambda *_: True),
    ),
    "of a tuple": (lambda m: len(m.several), _given("several", "__len__", lambda _: 5)),
    "of a dictionary": (
        lambda m: _or_one(lambda: m.table["k"]),
        _given("table", "__missing__", lambda *_: 5.0),
    ),
    "bases": (
        lambda m: m.thing.by(),
        lambda kinds: setattr(kinds.thing, "__bases__", (OtherBase,)),
    ),
}
cases = pytest.mark.parametrize("name", CASES)


@cases
def test_compiled_steps_follow(name: str) -> None:
    """The loss after the change is that of the step as written."""
    asks, change = CASES[name]
    kinds = Kinds()
    model, x = Net(asks, kinds), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    torch._dynamo.reset()
    with interpreted(), PlannedStep(model, loss_fn, optimizer, Plan(execution="compiled")) as step:
        for _ in range(3):
            step(x)
        change(kinds)
        wanted = float(loss_fn(model, x).detach())
        assert float(step(x)) == pytest.approx(wanted, rel=1e-5)


@cases
def test_what_was_read_no_longer_holds(name: str) -> None:
    """So that captured forms are made anew."""
    asks, change = CASES[name]
    kinds = Kinds()
    model, x = Net(asks, kinds), torch.randn(2, 4)
    with torch.no_grad():
        try:
            guards = CallReads(model, (x,)).guards
        except UnreadableError as error:
            if hasattr(variables, "object_protocol"):  # torch 2.13 reads all of them
                raise
            pytest.skip(f"torch {torch.__version__} reads no program that asks for it: {error}")
        assert guards.holds({"fn": model, "args": (x,)})
        change(kinds)
        assert not guards.holds({"fn": model, "args": (x,)})


def test_compiled_steps_follow_patches_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tools make them: `nn.Linear.forward` becomes another function for all layers."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def forward(layer: nn.Linear, x: Tensor) -> Tensor:
        return x @ layer.weight.t() * 2.0

    torch._dynamo.reset()
    with interpreted(), PlannedStep(model, loss_fn, optimizer, Plan(execution="compiled")) as step:
        for _ in range(3):
            step(x)
        monkeypatch.setattr(nn.Linear, "forward", forward)
        wanted = float(loss_fn(model, x).detach())
        assert float(step(x)) == pytest.approx(wanted, rel=1e-5)
