"""Programs, and tensors that lie in one memory: what is written into one is read in the other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from emulated_graphs import emulated_graphs
from ridgeline.callables.calls.dispatch import OF_WRITTEN
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError
from ridgeline.optimizers.shared_memory import sharing
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.captured_step import OF_BATCHES
from ridgeline.runtime.steps.graphs.checked import OF_BUFFERS
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.runner import OF_STATE

Change = Callable[["Layers", Adam], None]


class Layers(nn.Module):
    """Two layers, and a table that each call writes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4, 4))
        self.register_buffer("shown", torch.ones(4))
        self.register_buffer("again", torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.b(torch.tanh(self.a(x)))
        with torch.no_grad():
            self.table.mul_(0.9)
        return z + y + self.shown * self.again


def mean_square(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch).square().mean()


def inputs(index: int) -> tuple[Tensor, Tensor]:
    """Two tensors of numbers that are others for each index."""
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(index))
    return x, y


def _one_memory(model: Layers, _: Adam) -> None:
    model.a.weight.data = model.b.weight.data


def _some_rows(model: Layers, _: Adam) -> None:
    rows = torch.randn(6, 4)
    model.a.weight.data, model.b.weight.data = rows[:4], rows[2:]


def _of_a_buffer(model: Layers, _: Adam) -> None:
    model.shown = model.table[0]


def _of_a_parameter(model: Layers, _: Adam) -> None:
    model.shown = model.b.bias.detach()


def _of_state(model: Layers, optimizer: Adam) -> None:
    state = optimizer.state
    state[model.a.weight]["exp_avg"] = state[model.b.weight]["exp_avg"]


REFUSED: dict[str, tuple[Change, str]] = {
    "parameters": (_one_memory, "parameter 'a.weight' and parameter 'b.weight'"),
    "rows": (_some_rows, "parameter 'a.weight' and parameter 'b.weight'"),
    "buffers": (_of_a_buffer, "buffer 'table' and buffer 'shown'"),
    "a buffer": (_of_a_parameter, "parameter 'b.bias' and buffer 'shown'"),
    "state": (
        _of_state,
        "optimizer state 'a.weight/exp_avg' and optimizer state 'b.weight/exp_avg'",
    ),
}


def _tied(model: Layers, _: Adam) -> None:
    model.b.weight = model.a.weight


def _columns(model: Layers, _: Adam) -> None:
    matrix = torch.randn(4, 8)
    model.a.weight.data, model.b.weight.data = matrix[:, :4], matrix[:, 4:]


def _flat(model: Layers, _: Adam) -> None:
    parameters = [*model.parameters()]
    flat = torch.cat([p.detach().view(-1) for p in parameters])
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view_as(parameter)


def _read_only(model: Layers, _: Adam) -> None:
    model.shown = model.again


TAKEN: dict[str, Change] = {
    "tied": _tied,
    "columns": _columns,
    "flat": _flat,
    "read only": _read_only,
}


def trained(
    execution: Execution, change: Change, at: int, batch: Callable[[Layers, int], Any] | None = None
) -> tuple[list[float], list[str]]:
    """Losses and notes of steps, one of which the change is made before."""
    model, found = Layers(), list[float]()
    if at == 0:
        change(model, Adam(model.parameters()))
    optimizer = Adam(model.parameters(), 0.05)
    plan = Plan(execution=execution)
    with PlannedStep(model, mean_square, optimizer, plan, device="cpu") as step:
        for index in range(at + 5):
            if at and index == at:
                change(model, optimizer)
            found.append(float(step(inputs(index) if batch is None else batch(model, index))))
        return found, list(step.notes)


@pytest.mark.parametrize(("how", "at"), [*((how, how == "state") for how in REFUSED), ("rows", 4)])
def test_state_that_a_program_writes_lies_apart(interpreted: None, how: str, at: int) -> None:
    """From the beginning, and where it comes to lie in one memory later."""
    change, named = REFUSED[how]
    with pytest.raises(CaptureError) as refused:
        trained("step-graph", change, at)
    assert str(refused.value) == (
        f"wanted state that lies apart from what one program writes, got {named} in one memory; give one of "
        "them a clone, make two parameters one (b.weight = a.weight), or use execution='compiled' or 'eager'"
    )


@pytest.mark.parametrize("how", TAKEN)
def test_memory_that_is_not_written_twice_is_shared(interpreted: None, how: str) -> None:
    """One parameter under two names, parts of one memory, and buffers that are only read."""
    wanted, _ = trained("eager", TAKEN[how], 0)
    got, notes = trained("step-graph", TAKEN[how], 0)
    assert got == pytest.approx(wanted, rel=1e-4)
    assert any("forward, backward and optimizer run as one program" in note for note in notes)


def test_batches_in_the_memory_of_state_run_as_written(interpreted: None) -> None:
    """The loss sees what the step has written into them by then."""

    def batch(model: Layers, index: int) -> tuple[Tensor, Tensor]:
        return inputs(index)[0], model.table.detach() if index > 2 else torch.ones(4, 4)

    wanted, _ = trained("eager", lambda *_: None, 1, batch)
    for execution, note in (("step-graph", OF_STATE), ("compiled", OF_BUFFERS)):
        got, notes = trained(execution, lambda *_: None, 1, batch)
        assert got == pytest.approx(wanted, rel=1e-5)
        assert note in notes


def test_a_graph_does_not_copy_batches_in_the_memory_of_buffers() -> None:
    """The step writes into the buffer, and not into the copy that it would read."""

    def batch(model: Layers, index: int) -> tuple[Tensor, Tensor]:
        return inputs(index)[0], model.table.detach() if index > 6 else torch.ones(4, 4)

    wanted, _ = trained("eager", lambda *_: None, 5, batch)
    with emulated_graphs():
        got, notes = trained("graph", lambda *_: None, 5, batch)
    assert got == pytest.approx(wanted, rel=1e-5)
    assert OF_BATCHES in notes


def test_arguments_in_memory_that_is_written_run_as_written(interpreted: None) -> None:
    """Others run as the program, and are not compared again."""
    results = []
    for is_plain in (True, False):
        model = Layers().eval()
        with torch.no_grad():
            if is_plain:
                results.append([model(*_given(model, index)) for index in range(4)])
                continue
            with hybridize(model, inputs(0), "compiled") as hybrid:
                results.append([hybrid(*_given(model, index)) for index in range(4)])
                assert OF_WRITTEN in hybrid.report.notes
                assert hybrid.report.counters["eager_calls"] == 2
    torch.testing.assert_close(results[1], results[0])


def _given(model: Layers, index: int) -> tuple[Tensor, Tensor]:
    x, y = inputs(index)
    return (x, model.table.detach()) if index % 2 else (x, y)


def _halved(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Writes into its batch, and reads that again where the second tensor shows it."""
    x, y = batch
    return (model(x.mul_(0.5)) - y).square().mean()


@pytest.mark.parametrize("execution", ["eager", "compiled", "graph"])
def test_batches_that_share_what_is_written_are_those_of_the_code(
    interpreted: None, execution: Execution
) -> None:
    """Compiled code, and a graph with its copies, saw the write in one of them only."""

    def trained_on(start: int, execution: Execution) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        losses = []
        with PlannedStep(
            model, _halved, SGD(model.parameters(), 0.1), Plan(execution=execution), device="cpu"
        ) as step:
            for index in range(6):
                rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(index))
                losses.append(float(step((rows[:4], rows[start : start + 4]))))
            if execution == "graph":
                assert any(OF_BATCHES in note for note in step.notes) == (start < 4)
        return losses

    with emulated_graphs():
        assert trained_on(4, execution) == pytest.approx(trained_on(4, "eager"))
        if execution == "compiled":
            with pytest.raises(CaptureError, match="wanted tensors of a batch that lie apart"):
                trained_on(2, execution)
        else:
            assert trained_on(2, execution) == pytest.approx(trained_on(2, "eager"))


def test_elements_decide_and_only_where_one_is_written() -> None:
    """Whatever their type, and wherever in a row they stand."""
    matrix = torch.zeros(4, 8)
    left, right, middle = matrix[:, :4], matrix[:, 4:], matrix[:, 3:5]
    assert sharing([left, right, matrix[:0]]) is None
    assert sharing([left, right, middle]) == (0, 2)
    assert sharing([right], [left, middle]) == (0, 2)
    assert sharing([torch.ones(2)], [left, middle, matrix]) is None
    halves = matrix.view(torch.float16)
    assert sharing([left, halves[:, 8:]]) is None
    assert sharing([left, halves[:, 7:]]) == (0, 1)
