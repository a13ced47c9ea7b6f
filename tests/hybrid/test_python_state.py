"""State that a step keeps in Python: a replay would freeze it, so that no CUDA graph is captured of it."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixed_step_solver import odeint
from ridgeline.errors import CaptureError
from ridgeline.lint.python_state import changed_in_python
from ridgeline.plan import Plan
from ridgeline.reach.undo import Undo
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs.clearance import clear_for_capture
from ridgeline.workers.world import World

CPU = torch.device("cpu")
BATCH = torch.ones(4, 6)


class Net(nn.Module):
    """Does something besides computing."""

    def __init__(self, also: Callable[[Any, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        self.kept: Any = None
        self.count, self.rate = 0, 1000.5
        self.also = also

    def forward(self, x: Tensor) -> Tensor:
        y = self.cell(x)
        more = self.also(self, y)
        return y if more is None else y + more


def carry_hidden(net: Net, y: Tensor) -> Tensor:
    hidden = y if net.kept is None else 0.5 * net.kept + y
    net.kept = hidden.detach()
    return hidden


def carry_in_a_list(net: Net, y: Tensor) -> Tensor:
    hidden = y if net.kept is None else net.kept[0].mean() + y
    net.kept = [hidden.detach()]
    return hidden


def count(net: Net, y: Tensor) -> Tensor:
    net.count += 1
    return y * math.tanh(net.count / 1e4)


def append(net: Net, y: Tensor) -> None:
    net.kept = net.kept or []
    net.kept.append(y.detach())


def show(net: Net, y: Tensor) -> None:
    net.kept = y.detach()


def show_several(net: Net, y: Tensor) -> Tensor:
    net.kept = []
    net.kept.append(y.square().mean())
    net.kept.append(y.abs().mean())
    return sum(net.kept)


def keep_a_view(net: Net, y: Tensor) -> Tensor:
    net.kept = net.cell.weight.t()
    return y @ net.kept


def fill_once(net: Net, y: Tensor) -> Tensor:
    if net.kept is None:
        net.kept = torch.linspace(0, 1, 6)
    return y * net.kept


def set_the_same(net: Net, y: Tensor) -> Tensor:
    net.count = float(str(6)) * 1e3  # another object of the same value
    return y / net.count


def flip_a_coin(net: Net, y: Tensor) -> Tensor:
    return y * (2.0 if random.random() < 0.5 else 1.0)


def draw_with_numpy(net: Net, y: Tensor) -> Tensor:
    return y * float(np.random.rand())


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def clear(also: Any, optimizer: Any = torch.optim.SGD, loss: Any = loss_fn) -> None:
    """The clearance that a graph runner asks for, with the CPU in place of the device."""
    torch.manual_seed(0)
    net = Net(also)
    plan = Plan(execution="graph")
    body = StepBody(
        net, loss, optimizer(net.parameters(), lr=0.1), plan, None, clip_norm=None, device=CPU
    )
    clear_for_capture(body, BATCH, World(0, 1, 0, CPU), [])


def line_in(function: Any, after: int) -> str:
    """The line so many after the first one, as messages name it."""
    path = Path(function.__code__.co_filename).relative_to(Path.cwd())
    return f"{path}:{function.__code__.co_firstlineno + after} in {function.__name__}"


@pytest.mark.parametrize(
    ("also", "what", "after"),
    [
        (carry_hidden, "a change of 'kept' in Python", 2),
        (carry_in_a_list, "a change of 'kept' in Python", 2),
        (count, "a change of 'count' in Python", 1),
        (append, "a change of the length of a list in Python", 2),
    ],
)
def test_what_a_replay_would_freeze_is_not_captured(also: Any, what: str, after: int) -> None:
    """A hidden state that the next step reads, a count, a list that grows."""
    with pytest.raises(CaptureError) as caught:
        clear(also)
    (line,) = str(caught.value).splitlines()[1:]
    assert line == (
        f"- wanted a step that changes tensors in place only, got {what} at {line_in(also, after)}: Python "
        "runs once, at capture: a hidden state or a count stays what it was then in every replay; keep it in a buffer of "
        "the model and write into it (copy_, add_), or do it after each training step"
    )


@pytest.mark.parametrize("also", [flip_a_coin, draw_with_numpy])
def test_what_the_host_draws_is_not_captured(also: Any) -> None:
    """Every replay would repeat it."""
    with pytest.raises(CaptureError, match="wanted random numbers drawn on the device"):
        clear(also)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("also", [show, show_several, keep_a_view, fill_once, set_the_same])
def test_what_a_replay_renews_is_captured(also: Any, optimizer: Any) -> None:
    """Tensors that are kept to be shown, made anew in each step, or made once; and equal numbers."""
    clear(also, optimizer)


def test_a_count_of_the_loss_function_is_seen() -> None:
    """Wherever the step keeps it: here in a closure."""
    steps = 0

    def counting(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return loss_fn(model, batch)

    with pytest.raises(CaptureError, match="got a change of 'steps' in Python"):
        clear(show, loss=counting)


def test_one_program_is_judged_more_strictly() -> None:
    """It renews no tensor that is kept outside, so that there all are changes but equal numbers."""
    net = Net(show)
    before = Undo(net, values=False)
    net(BATCH)
    assert changed_in_python(before) == "'kept'"
    assert changed_in_python(before, lambda tensor: False) == ""
    net.kept, net.rate = None, float(str(net.rate))
    assert changed_in_python(before) == ""


def test_a_count_in_a_function_that_a_solver_calls_has_its_line() -> None:
    """Where the solver lies in another file, and the function is called through others."""

    class Field(nn.Module):
        nfe = 0

        def forward(self, t: float, y: Tensor) -> Tensor:
            self.nfe += 1
            return -t * y

    field = Field()

    def solve(net: Net, y: Tensor) -> Tensor:
        return odeint(field, y)

    with pytest.raises(CaptureError, match="got a change of 'nfe' in Python at ") as caught:
        clear(solve)
    assert line_in(Field.forward, 1) in str(caught.value)


@pytest.mark.parametrize("key", ["a key", "an attribute"])
def test_all_lines_that_may_have_made_a_change_are_named(key: str) -> None:
    """Of functions that ran."""
    logs = {"steps": 0}

    def twice(net: Net, y: Tensor) -> Tensor:
        if key == "a key":
            logs["steps"] += 1
        else:
            setattr(net, "count", net.count + 1)  # noqa: B010 - also so
        return y

    with pytest.raises(CaptureError) as caught:
        clear(twice)
    assert line_in(twice, 2 if key == "a key" else 4) in str(caught.value)
