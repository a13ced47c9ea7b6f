"""What torch's compiler would break a program at, and one program for the whole step holds as it is."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from adversary.interpreting import interpreted
from ridgeline.errors import CaptureError
from ridgeline.guards.guards import Guards
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.runner import ONE_FRAME

IS_ON = np.bool_(True)
"""Of these the compiler has no guard."""


def set_attribute(model: nn.Module, x: Tensor) -> Tensor:
    """As networks for speech do, so that checkpoints find an input that requires gradients."""
    view = x[:, None]
    view.requires_grad = True
    return model(view).square().mean()


def made_leaf(model: nn.Module, x: Tensor) -> Tensor:
    state = torch.zeros(2, requires_grad=True)
    drawn = torch.rand_like(x, requires_grad=True)
    return (model(x + state) * torch.tensor(0.5, requires_grad=True) + drawn.mean()).square().mean()


def old_variable(model: nn.Module, x: Tensor) -> Tensor:
    state = Variable(torch.zeros(len(x), 2))
    noise = Variable(torch.randn(len(x), 2), requires_grad=True)
    return model(Variable(x) + state + 0.1 * noise).square().mean()


def sizes_of_numpy(model: nn.Module, x: Tensor) -> Tensor:
    flat = x.view(-1, int(np.prod(x.shape[1:])))
    if len(flat) % np.lcm(2, 3) == 0 and isinstance(np.prod(x.shape), np.integer):
        flat = flat / np.sqrt(flat.shape[1])
    half = flat[:, : (np.ceil(x.shape[1] / np.sqrt(4)) * 2).astype(int)]
    return model(half * IS_ON).square().mean()


def told(model: nn.Module, x: Tensor) -> Tensor:
    warnings.warn("the old name", FutureWarning, stacklevel=1)
    return model(x).square().mean()


class Steps(torch.autograd.Function):
    """As neurons that fire: the slope of their gradient lies in the class."""

    slope = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.clamp(x, max=Steps.slope)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (1 + Steps.slope * x.abs())


def fired(model: nn.Module, x: Tensor) -> Tensor:
    return Steps.apply(model(x)).square().mean()


Loss = Callable[[nn.Module, Tensor], Tensor]


def check_trains_as_plain_loop(loss_fn: Loss) -> None:
    """Losses, parameters and random state."""
    trained = []
    for plan in (Plan(), Plan(execution="step-graph")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with interpreted(), PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
            losses = [step(torch.randn(6, 2)).detach().clone() for _ in range(4)]
            assert step.notes[-1:] == ([] if plan == Plan() else [ONE_FRAME])
        trained.append([*losses, *model.state_dict().values(), torch.rand(1)])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the old name:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "loss_fn", [set_attribute, made_leaf, old_variable, sizes_of_numpy, told, fired]
)
def test_one_program_trains_as_a_plain_loop(loss_fn: Loss) -> None:
    check_trains_as_plain_loop(loss_fn)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_the_class_of_a_function_holds_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"model": nn.Linear(2, 1), "x": torch.ones(3, 2)}
    guards = Guards(fired, arguments, ["x"])
    assert guards.holds(arguments)
    monkeypatch.setattr(Steps, "slope", 3.0)
    assert not guards.holds(arguments)


def span(x: Tensor, most: int) -> Tensor:
    return torch.tensor(min(x.size(-1), most))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_one_program_holds_what_is_scripted() -> None:
    """Its operators are those of the source: DeBERTa computes in it how far apart words attend."""
    width = torch.jit.script(span)
    offsets = torch.arange(4.0)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        near = offsets[2 - width(x, 2) : 2 + width(x, 2)]
        return model(x * near.mean()).square().mean()

    check_trains_as_plain_loop(loss_fn)


def test_a_number_that_torch_takes_out_of_a_tensor_is_placed() -> None:
    """No line of the optimizer asks for it: an operator is given a tensor for a number."""
    model = nn.Linear(2, 1)
    betas = torch.tensor(0.9), torch.tensor(0.99)
    optimizer = torch.optim.Adam(model.parameters(), betas=betas)
    plan = Plan(execution="step-graph")

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    with PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        step(torch.ones(3, 2))  # the first is eager
        with pytest.raises(CaptureError, match=r"at adam\.py:\d+ in _\w+_tensor_adam, which reads"):
            step(torch.ones(3, 2))


def muted(model: nn.Module, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(x).square().mean()


def branching(model: nn.Module, x: Tensor) -> Tensor:
    is_left_out = torch.rand([]) < 0.0  # decides nothing
    loss = model(x).square().mean() * (0.0 if is_left_out else 1.0)
    return loss if x.sum() > -1e9 else 2.0 * loss


@pytest.mark.parametrize(
    ("loss_fn", "line"),
    [(muted, 'warnings.simplefilter("ignore")'), (branching, "if x.sum() > -1e9")],
)
def test_a_refusal_names_the_line_that_has_to_change(loss_fn: Loss, line: str) -> None:
    """The program's own, not Python's below it; no draw that a program could hold."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    source, first = inspect.getsourcelines(loss_fn)
    (place,) = (number for number, text in enumerate(source, first) if line in text)
    plan = Plan(execution="step-graph")
    where = rf"\({Path(__file__).name}:{place} in {loss_fn.__name__}\)"
    with PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        step(torch.ones(3, 2))  # the first is eager
        with pytest.raises(CaptureError, match=where):
            step(torch.ones(3, 2))
