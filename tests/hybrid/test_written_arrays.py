"""Arrays of NumPy that a step writes: what looks at the step leaves them, and no program forgets to write."""

import array
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from emulated_graphs import emulated_graphs
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError, ObstacleError, RidgelineError
from ridgeline.guards.reading import read_program
from ridgeline.lint.lint import inspect_step
from ridgeline.plan import Execution, Plan
from ridgeline.reach.undo import Undo
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.usefixtures("compiler_begins_anew")

X = torch.randn(2, 4)


class Net(nn.Module):
    """Counts its calls in an array."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.counts = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        """Of a linear layer."""
        self.counts[0] += 1
        return self.linear(x)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _of_batch(model: nn.Module, batch: Any) -> Tensor:
    batch["counts"][0] += 1
    return model(batch["x"]).square().mean()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01)


def _changed(numbers: "np.ndarray[Any, Any]", change: Callable[[Any], object]) -> list[str]:
    before = Undo({"array": numbers}, values=False, arrays=True)
    change(numbers)
    return [one.what for one in before.changes()]


def _set(numbers: Any) -> None:
    numbers[1] = 5


@pytest.mark.parametrize(
    "numbers",
    [
        np.zeros(3),
        np.asfortranarray(np.zeros((3, 2))),
        np.zeros((3, 4))[:, ::2],
        np.array([None, "a"], dtype=object),
    ],
)
def test_written_elements_are_a_change(numbers: Any) -> None:
    """In every layout, and of objects."""
    assert _changed(numbers, _set) == [f"an array of NumPy of shape {numbers.shape}"]
    assert _changed(numbers, _set) == []


@pytest.mark.parametrize(
    ("buffer", "name"),
    [
        (array.array("d", [0, float("nan")]), "an array of Python of 2"),
        (bytearray(3), "a bytearray of 3"),
    ],
)
def test_written_numbers_of_pythons_arrays_are_a_change(buffer: Any, name: str) -> None:
    """Also where they grow; what is left alone has not changed."""
    before = Undo({"buffer": buffer})
    assert [*before.changes()] == []
    saved = bytes(buffer)
    for change in (lambda: _set(buffer), lambda: buffer.append(1)):
        change()
        assert [one.what.rpartition(" ")[0] for one in before.changes()] == [
            name.rpartition(" ")[0]
        ]
        before.restore()
        assert bytes(buffer) == saved


class Tally:
    """A loss that counts its calls in arrays of Python's."""

    def __init__(self) -> None:
        self.numbers, self.bytes = array.array("d", [0]), bytearray(1)

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        """Of a linear layer."""
        self.numbers[0] += 1
        self.bytes[0] += 1
        return _loss(model, x)


def test_steps_count_in_pythons_arrays_once() -> None:
    """Checks run compiled steps several times, and graphs refuse them."""
    executions: tuple[Execution, ...] = ("compiled", "graph")
    for execution in executions:
        model, tally = nn.Linear(4, 4), Tally()
        refused = pytest.raises(ObstacleError) if execution == "graph" else contextlib.nullcontext()
        with (
            emulated_graphs(),
            PlannedStep(model, tally, _sgd(model), Plan(execution=execution)) as step,
            refused,
        ):
            step(X)
        assert tally.numbers[0] == tally.bytes[0] == (0 if execution == "graph" else 1)


def test_no_number_equals_itself() -> None:
    """What holds NaN and is left alone has not changed."""
    assert _changed(np.full(3, np.nan), lambda _: None) == []
    assert _changed(np.zeros(0), lambda _: None) == []


def test_traces_leave_arrays_alone() -> None:
    """The code runs on tensors without elements, and on arrays as they are."""
    model, batch = nn.Linear(4, 4), {"x": X, "counts": np.zeros(2)}
    rl.trace(model, _of_batch, _sgd(model), batch)
    assert not batch["counts"].any()
    net = Net()
    rl.trace(net, _loss, _sgd(net), X)
    assert not net.counts.any()


def test_a_written_array_is_found_in_a_program() -> None:
    """And one that is only read is not."""

    def program(net: Any, x: Any) -> Any:
        return net(x)

    found = read_program(program, {"net": Net(), "x": X}).writes
    assert [(one.what, one.kind) for one in found] == [("L['net'].counts", "numpy.ndarray")]

    def reading(numbers: Any, x: Any) -> Any:
        return x * torch.from_numpy(numbers)

    assert read_program(reading, {"numbers": np.ones(4, np.float32), "x": X}).writes == ()


def test_one_program_is_refused() -> None:
    """It would count no further."""
    net = Net()
    with PlannedStep(net, _loss, _sgd(net), Plan(execution="step-graph")) as step:
        step(X)  # the step before the trace
        with pytest.raises(CaptureError) as caught:
            step(X)
    assert str(caught.value) == (
        "wanted a step that changes tensors only, got one that changes model.counts (a numpy.ndarray), which "
        "one program would never do again; do it after each training step, or use execution='compiled' or 'eager'"
    )
    assert net.counts[0] == 1


@pytest.mark.parametrize("execution", ["graph", "model-graph"])
def test_graphs_are_refused(execution: Any) -> None:
    """Replays run nothing on the host."""
    net = Net()
    with (
        emulated_graphs(),
        PlannedStep(net, _loss, _sgd(net), Plan(execution=execution)) as step,
        pytest.raises(ObstacleError, match="an array of NumPy of shape"),
    ):
        step(X)
    assert net.counts[0] == 0


def test_calls_are_refused() -> None:
    """With nothing counted."""
    net = Net()
    with pytest.raises(RidgelineError, match=r"writes Net\.counts \(a numpy\.ndarray\)"):
        hybridize(net, X, mode="script")
    with pytest.raises(RidgelineError, match=r"writes Net\.counts \(a numpy\.ndarray\)"):
        rl.parallelize(net, X)
    assert not net.counts.any()


def test_looking_at_a_step_leaves_the_arrays_of_its_batch() -> None:
    """The linter runs it twice."""
    model, batch = nn.Linear(4, 4), {"x": X, "counts": np.zeros(2)}
    body = StepBody(
        model, _of_batch, _sgd(model), Plan(), None, clip_norm=None, device=torch.device("cpu")
    )
    inspect_step(body, batch, device="cpu")
    assert not batch["counts"].any()
