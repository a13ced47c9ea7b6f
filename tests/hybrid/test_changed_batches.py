"""Batches with keys in another order, that a step writes into or uses up; arguments that are one tensor."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.autoparallel.parallelize import parallelize
from ridgeline.callables.calls.dispatch import OWN
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError, SideEffectError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tensors.batch_pattern import BatchPattern
from ridgeline.tensors.usual_batch import usual_batch

pytestmark = pytest.mark.filterwarnings(
    "ignore:Your compiler for AOTAutograd is returning a function"
)


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    with interpreted(), emulated_graphs():
        yield


def x_of(index: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(index))


def trained(execution: Execution, loss: Any, batches: list[Any]) -> Tensor:
    """The losses of steps."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, loss, optimizer, Plan(execution=execution), device="cpu") as step:
        return torch.stack([step(batch) for batch in batches])


def by_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    parts = [place * model(x).square().mean() for place, x in enumerate(batch.values(), 1)]
    return torch.stack(parts).sum()


def halving(model: nn.Module, x: Tensor) -> Tensor:
    x.mul_(0.5)
    loss: Tensor = model(x).square().mean()
    return loss


def padded(index: int, width: int) -> Tensor:
    return torch.cat([x_of(index), torch.zeros(3, width - 4)], 1)


def moving(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    places, x = batch
    places += model(x)
    return places.square().mean()


def taking(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    target = batch.pop("target")
    return (model(batch["x"]) - target).square().mean()


def drawing(model: nn.Module, batch: Iterator[Tensor]) -> Tensor:
    loss: Tensor = model(next(batch)).square().mean()
    return loss


def in_turn(index: int) -> dict[str, Tensor]:
    parts = [("a", x_of(index)), ("b", x_of(index + 1))]
    return dict(reversed(parts) if index in (5, 7) else parts)


def taken(index: int) -> dict[str, Tensor]:
    return {"x": x_of(index), "target": x_of(index + 1)}


def test_keys_in_another_order_are_another_batch() -> None:
    """Code may go through them."""
    x, y = x_of(0), x_of(1)
    batch, other = {"a": x, "b": y}, {"b": y, "a": x}
    assert BatchPattern(batch).tensors(batch) == [x, y]
    assert BatchPattern(batch).tensors(other) is None
    read = usual_batch(batch, [x, y])
    assert read is not None
    assert read(batch) == (x, y)
    assert read(other) is None


@pytest.mark.parametrize("execution", ["step-graph", "graph"])
def test_steps_go_through_keys_in_the_order_of_each_batch(execution: Execution) -> None:
    """Replays too, of which the batch before had the other order."""
    wanted, got = (
        trained(mode, by_place, [in_turn(index) for index in range(9)])
        for mode in ("eager", execution)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("execution", ["step-graph", "graph"])
def test_what_a_step_writes_into_its_batch_is_there(execution: Execution) -> None:
    """A replay writes into copies, which go back."""
    batches = [x_of(index) for index in range(7)]
    trained(execution, halving, batches)
    for index, x in enumerate(batches):
        torch.testing.assert_close(x, x_of(index) * 0.5)


@pytest.mark.parametrize("execution", ["compiled", "step-graph"])
@pytest.mark.parametrize("width", [4, 6])
def test_a_step_may_add_to_its_batch_what_it_trains(execution: Execution, width: int) -> None:
    """As networks of particles move these; each run of the check begins without the one before."""
    wanted, got = (
        trained(mode, moving, [(padded(i, width)[:, :4], x_of(i + 9)) for i in range(4)])
        for mode in ("eager", execution)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_compiled_step_may_take_from_its_batch() -> None:
    """Each run of the check has containers of its own."""
    wanted, got = (
        trained(mode, taking, [taken(index) for index in range(4)])
        for mode in ("eager", "compiled")
    )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_replayed_step_may_not_take_from_its_batch() -> None:
    """No replay does."""
    with pytest.raises(CaptureError, match=r"got one that changes batch \(a dict\)"):
        trained("graph", taking, [taken(index) for index in range(6)])


@pytest.mark.parametrize("execution", ["compiled", "graph"])
def test_iterators_as_batches_are_refused_by_name(execution: Execution) -> None:
    """A check would use them up."""
    with pytest.raises(SideEffectError, match="take from iterators outside of the step"):
        trained(execution, drawing, [iter([x_of(0)])])


def test_what_a_function_holds_is_no_result_to_parallelize() -> None:
    """It says so by name."""
    model = nn.Linear(4, 4)
    given: Callable[[Tensor], Any] = lambda x: (model(x), model.weight)  # noqa: E731
    with pytest.raises(
        CaptureError, match=r"results that are computed, got a tensor of shape \(4, 4\)"
    ):
        parallelize(given, x_of(0))


class Comparing(nn.Module):
    """Asks whether its arguments, or an argument and its weight, are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        y = x * 2.0 if x is z else x + z
        return y - 7.0 if z is self.weight else y


class Attending(nn.Module):
    """Attention of several heads to any two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value, need_weights=False)[0]


@pytest.mark.parametrize("mode", ["compiled", "script", "graph"])
def test_code_may_ask_whether_two_arguments_are_one(mode: Execution) -> None:
    """One tensor at two places is a program of its own; a weight that is given runs as written, and is noted."""
    model, x, z = Comparing(), x_of(0), x_of(1)
    with hybridize(model, (x, z), mode=mode) as fast, torch.no_grad():
        for given in ((x, z), (x, x), (x, model.weight), (x, z.clone())):
            torch.testing.assert_close(fast(*given), model(*given))
        assert fast.report.counters == {"eager_calls": 1, "shapes": 2, "rebuilds": 0}
        assert OWN in fast.report.notes


@pytest.mark.parametrize("mode", ["compiled", "script", "packaged"])
def test_attention_to_itself_is_captured(mode: Execution) -> None:
    """However often it is called, by shapes and by which arguments are one."""
    model = Attending().eval()
    with hybridize(model, (x_of(0),) * 3, mode=mode, max_shapes=4) as fast, torch.no_grad():
        for index in range(40):
            x, z = (torch.randn(3 + index % 2, 4) for _ in range(2))
            for given in ((x, x, x), (x, z, z)):
                torch.testing.assert_close(fast(*given), model(*given), rtol=1e-4, atol=1e-5)
        assert fast.report.counters == {"eager_calls": 0, "shapes": 4, "rebuilds": 0}


def laid_out(model: nn.Module, x: Tensor) -> Tensor:
    factor = 1.0 if x.is_contiguous() else 3.0 if x.stride(0) else 5.0
    return factor * model(x).square().mean()


@pytest.mark.parametrize("execution", ["graph", "step-graph"])
@pytest.mark.parametrize(
    "lie", [lambda x: torch.cat([x, x], 1)[:, :4], lambda x: x[:1].expand(3, 4)]
)
def test_code_that_asks_how_the_first_batches_lie(
    execution: Execution, lie: Callable[[Tensor], Tensor]
) -> None:
    """A program has copies without gaps, of which the code would say something else."""
    batches = [lie(x_of(index)) for index in range(5)] + [x_of(6), lie(x_of(7))]
    wanted = trained("eager", laid_out, batches)
    torch.testing.assert_close(trained(execution, laid_out, batches), wanted)
