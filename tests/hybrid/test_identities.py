"""Which objects are one: a variable of a module that means another object is seen by whatever asks for that."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo import variables

from adversary.interpreting import interpreted
from ridgeline.callables.calls.reads import CallReads
from ridgeline.plan import Plan
from ridgeline.programs.compiling import many_variants
from ridgeline.programs.watches.added import with_guards
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")


class Mode:
    """Compared by identity."""


class Other:
    """Another class."""


CURRENT: Any = Mode()
KNOWN: list[Any] = [CURRENT]
KIND: type = Mode


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The compiler keeps what it compiled by code, which all cases share."""
    torch._dynamo.reset()
    before = CURRENT
    yield
    _set(CURRENT=before, KIND=Mode)
    KNOWN[:] = [before]


def _set(**values: Any) -> None:
    globals().update(values)


class Net(nn.Module):
    """Asks whether what it holds is that of the module."""

    def __init__(self, asks: Callable[["Net"], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.held, self.kind = CURRENT, KIND
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by the answer."""
        return self.linear(x) * (2.0 if self.asks(self) else 3.0)


ASKS: dict[str, tuple[Callable[[Net], bool], Callable[[], None]]] = {
    "is": (lambda m: m.held is CURRENT, lambda: _set(CURRENT=Mode())),
    "is not": (lambda m: m.held is not CURRENT, lambda: _set(CURRENT=Mode())),
    "==": (lambda m: m.held == CURRENT, lambda: _set(CURRENT=Mode())),
    "in": (lambda m: m.held in KNOWN, lambda: KNOWN.__setitem__(0, Mode())),
    "id": (lambda m: id(m.held) == id(CURRENT), lambda: _set(CURRENT=Mode())),
    "class": (lambda m: m.kind is KIND, lambda: _set(KIND=Other)),
}
HAS_ONE_COMPARISON = hasattr(getattr(variables, "object_protocol", None), "vt_identity_compare")
"""Whether this version of torch's compiler asks in one place, and not in a part of its own for each operator."""
cases = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name in ("==", "in") and not HAS_ONE_COMPARISON,
                reason=f"{name} of objects without __eq__ is followed from torch 2.13 on",
            ),
        )
        for name in ASKS
    ],
)


@cases
def test_compiled_programs_follow_there_and_back(name: str) -> None:
    """Compiled once for each answer; nothing else compiles anew."""
    asks, change = ASKS[name]
    model, x = Net(asks), torch.randn(2, 4)
    held, kind = CURRENT, KIND
    compiled: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    run = torch.compile(model, backend=with_guards(backend))
    with many_variants():
        for _ in range(2):
            assert torch.equal(run(x), model(x))
            assert len(compiled) == 1
        change()
        assert torch.equal(run(x), model(x))
        _set(CURRENT=held, KIND=kind)
        KNOWN[0] = held
        assert torch.equal(run(x), model(x))
        assert len(compiled) == 2


@cases
def test_what_was_read_no_longer_holds(name: str) -> None:
    """So that captured forms are made anew; from either answer."""
    asks, change = ASKS[name]
    model, x = Net(asks), torch.randn(2, 4)
    held, kind = CURRENT, KIND
    arguments = {"fn": model, "args": (x,)}
    with torch.no_grad():
        first = CallReads(model, (x,)).guards
        assert first.holds(dict(arguments))
        change()
        assert not first.holds(dict(arguments))
        second = CallReads(model, (x,)).guards
        assert second.holds(dict(arguments))
        _set(CURRENT=held, KIND=kind)
        KNOWN[0] = held
        assert not second.holds(dict(arguments))


@pytest.mark.parametrize("execution", ["compiled", "step-graph"])
def test_steps_follow(execution: Any) -> None:
    """The loss after the change is that of the step as written."""
    asks, change = ASKS["is"]
    model, x = Net(asks), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    with interpreted(), PlannedStep(model, loss_fn, optimizer, Plan(execution=execution)) as step:
        for _ in range(3):
            step(x)
        change()
        wanted = float(loss_fn(model, x).detach())
        assert float(step(x)) == pytest.approx(wanted, rel=1e-5)
