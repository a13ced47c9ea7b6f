"""Assertions about the values of tensors: compiled steps raise what the step as written raises."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checked_models import Net, checked, sized
from torch import Tensor, fx, nn

from ridgeline.callables.hybridize import hybridize
from ridgeline.guards.reading import UnreadableError, read_program
from ridgeline.plan import Plan
from ridgeline.programs.watches.added import with_guards
from ridgeline.runtime.steps.step import PlannedStep

X = torch.ones(2, 4)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.fixture(autouse=True)
def clean(interpreted: None) -> Iterator[None]:
    """The compiler knows nothing before."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_steps_raise_what_python_raises(execution: Any) -> None:
    """And go on with the next batch, from where they were."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with PlannedStep(model, _loss, optimizer, Plan(execution=execution)) as step:
        step(X)
        before = model.linear.weight.detach().clone()
        with pytest.raises(AssertionError, match="too large"):
            step(X * 1000)
        assert torch.equal(model.linear.weight, before)
        wanted = float(_loss(model, X).detach())
        assert float(step(X)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("words", [(), ("too large",)])
def test_operators_that_assert_are_no_part_of_what_is_compiled(words: Any) -> None:
    """The compiler leaves out what gives nothing."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        torch._assert_async(x.max() < 100, *words)
        return model(x).square().mean()

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with PlannedStep(model, loss, optimizer, Plan(execution="compiled")) as step:
        step(X)
        with pytest.raises(RuntimeError, match=r"too large|nonzero value"):
            step(X * 1000)
    with PlannedStep(model, loss, optimizer, Plan(execution="step-graph")) as step:
        step(X)
        with pytest.raises(UnreadableError, match="of the values of a tensor, which a captured"):
            step(X)


def test_calls_raise_what_python_raises() -> None:
    """Compiled ones, in pieces."""
    call = hybridize(Net(), X, mode="compiled")
    with pytest.raises(AssertionError, match="too large"):
        call(X * 1000)


def test_a_program_in_one_piece_is_refused() -> None:
    """With the line; an assertion about a shape is none about values."""
    line = checked.__code__.co_firstlineno + 2
    with pytest.raises(UnreadableError, match=rf"checked_models\.py:{line} in checked"):
        read_program(checked, {"x": X})
    assert "mul" in read_program(sized, {"x": X}).graph


def test_what_others_compile_is_as_before() -> None:
    """Their programs hold assertions."""
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with_guards(lambda graph, _: graph.forward)
    torch.compile(Net(), backend=backend, fullgraph=True)(X)
    assert "_assert_async" in str(graphs[0].code)
