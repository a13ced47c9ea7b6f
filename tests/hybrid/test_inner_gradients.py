"""Steps that take gradients inside their loss, as one program and as a graph."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")


def equation(model: nn.Module, x: Tensor) -> Tensor:
    """Of diffusion: the network's own derivatives are in the loss."""
    x = x.clone().requires_grad_()
    value = model(x)
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    return (slope[:, 1] - 0.1 * bend[:, 0]).square().mean() + model(x * 0).square().mean()


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """On the slope between two samples."""
    between = x.lerp(x.flip(0), torch.rand(len(x), 1)).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return model(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


@contextlib.contextmanager
def offered(execution: Execution) -> Iterator[None]:
    with emulated_graphs() if execution == "graph" else interpreted():
        yield


@pytest.mark.parametrize("execution", ["graph", "step-graph"])
@pytest.mark.parametrize("loss_fn", [equation, penalty])
def test_they_train_as_the_eager_step(
    loss_fn: Callable[[nn.Module, Tensor], Tensor], execution: Execution
) -> None:
    """Losses and parameters, once the step is captured, too."""
    trained = []
    for plan in (Plan(), Plan(execution=execution)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        with offered(execution), PlannedStep(model, loss_fn, optimizer, plan, device="cpu") as step:
            losses = [step(torch.randn(6, 2)).detach().clone() for _ in range(8)]
        trained.append([torch.stack(losses), *model.state_dict().values()])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-6)


def curvature(model: nn.Module, x: Tensor) -> Tensor:
    """By forward over reverse mode, through which torch traces no backward pass without data."""
    parameters = dict(model.named_parameters())

    def value(point: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (point,)).squeeze(-1)

    return torch.func.vmap(torch.func.hessian(value))(x).square().mean()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_what_fails_in_the_backward_pass_is_placed_there() -> None:
    """No line of the step's own is reached, and a line of torch's would say nothing."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    plan, refusal = (
        Plan(execution="step-graph"),
        r"within the backward pass; use execution='eager'$",
    )
    with PlannedStep(model, curvature, optimizer, plan, device="cpu") as step:
        step(torch.ones(3, 2))  # the first is eager
        with pytest.raises(CaptureError, match=refusal):
            step(torch.ones(3, 2))
