"""Batches that are objects which hold tensors (a graph of a library's, a dataclass): no program mistakes one."""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.callables.hybridize import hybridize
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tensors.batch import signature
from ridgeline.tensors.batch_pattern import BatchPattern
from ridgeline.tensors.usual_shapes import UsualShapes

pytestmark = pytest.mark.filterwarnings(
    "ignore:Your compiler for AOTAutograd is returning a function"
)
CAPTURED: list[Execution] = ["step-graph", "graph"]


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    with interpreted(), emulated_graphs():
        yield


class Graph:
    """As libraries have it: its text says shapes only."""

    def __init__(self, index: int) -> None:
        self.x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))

    def __repr__(self) -> str:
        return f"Graph(x={[*self.x.shape]})"


@dataclasses.dataclass
class Long:
    """Its text leaves out what lies in the middle of long tensors."""

    x: Tensor


class Keeping:
    """Has no place for weak references."""

    __slots__ = ("x",)

    def __init__(self, index: int) -> None:
        self.x = Graph(index).x


def long(index: int) -> Long:
    x = torch.ones(600, 4)
    x[300] = 1.0 + index
    return Long(x)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch.x).square().mean()
    return loss


def trained(execution: Execution, batches: Iterator[Any], after: Callable[[], object]) -> Tensor:
    """The losses of steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    with PlannedStep(model, loss_of, optimizer, Plan(execution=execution), device="cpu") as step:
        for batch in batches:
            losses.append(step(batch))
            after()
    return torch.stack(losses)


def check(execution: Execution, batches: Callable[[], Iterator[Any]]) -> None:
    wanted, got = (trained(mode, batches(), lambda: None) for mode in ("eager", execution))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("execution", CAPTURED)
@pytest.mark.parametrize("make", [Graph, long, Keeping])
def test_another_object_is_another_batch(execution: Execution, make: Callable[[int], Any]) -> None:
    """Even one with the same text; also where each is gone when the next one comes."""
    check(execution, lambda: iter([make(index) for index in range(9)]))
    check(execution, lambda: map(make, range(9)))


@pytest.mark.parametrize(
    ("execution", "said"),
    [
        ("step-graph", "batches that hold another Graph than the compiled one ran eagerly"),
        ("graph", "batches that hold another Graph than the captured one ran without a graph"),
    ],
)
def test_a_note_says_that_objects_are_others(execution: Execution, said: str) -> None:
    """Not that shapes are, which they may not be; where they are, it says that."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, loss_of, optimizer, Plan(execution=execution), device="cpu") as step:
        for index in range(6):
            step(Graph(index))
        assert (
            f"{said}: programs read the tensors of the very object that they were made with; put the "
            "tensors themselves into the batch" in step.notes
        )
    shapes, graph = UsualShapes(), Graph(0)
    assert shapes.is_usual((graph, torch.ones(2)))
    for other in ((graph, torch.ones(3)), (Graph(0), torch.ones(3)), graph, (Graph(0), None)):
        assert shapes.why_other(other, "batches of other shapes") == "batches of other shapes"


@pytest.mark.parametrize("execution", CAPTURED)
def test_one_object_of_all_steps_is_served_by_a_program(execution: Execution) -> None:
    """A whole graph in each step, as nodes of it are classified; what is written into it is read."""
    graph = Graph(0)

    def whole() -> Iterator[Graph]:
        graph.x.copy_(Graph(0).x)
        for index in range(9):
            graph.x[1] = float(index)
            yield graph

    check(execution, whole)


@pytest.mark.parametrize("execution", CAPTURED)
def test_another_tensor_in_the_same_object_is_seen(execution: Execution) -> None:
    """The program reads the former one."""
    graph = Graph(0)

    def changing() -> Iterator[Graph]:
        for index in range(12):
            graph.x = Graph(index // 6).x
            yield graph

    check(execution, changing)


@pytest.mark.parametrize("mode", ["compiled", "graph"])
def test_hybridized_modules_take_other_objects(mode: Execution) -> None:
    """In whatever form: the results are those of the module."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, graph: Graph) -> Tensor:
            result: Tensor = self.linear(graph.x)
            return result

    module = Reading()
    with torch.no_grad(), hybridize(module, (Graph(0),), mode=mode) as fast:
        for index in range(4):
            graph = Graph(index)
            torch.testing.assert_close(fast(graph), module(graph))


def test_constants_are_compared_by_value_and_holders_of_tensors_by_identity() -> None:
    """A batch that was looked at is not kept for it."""
    graph, other = Graph(0), Graph(0)
    assert signature({"g": graph}) == signature({"g": graph}) != signature({"g": other})
    assert BatchPattern([graph]).tensors([graph]) == []
    assert BatchPattern([graph]).tensors([other]) is None
    assert BatchPattern([graph]).tensors([None]) is None
    assert repr(signature(graph)[1]) == "(<tensors in a Graph>,)"
    assert signature(Keeping(0)) != signature(Keeping(0))
    gone = signature(Graph(0))
    gc.collect()
    assert gone != signature(Graph(0))


def test_arrays_are_compared_by_their_elements() -> None:
    """Of which the text rounds numbers, and leaves many out."""
    array, near = numpy.ones(3), numpy.ones(3)
    near[1] += 1e-12
    assert signature(array) == signature(array.copy()) != signature(near)
    assert BatchPattern(array).tensors(array.copy()) == []
    assert BatchPattern(array).tensors(near) is None
    large = numpy.zeros(5000)
    assert signature(large) == signature(large) != signature(large.copy())
