"""Hooks on gradients are called as often and in the order as in eager steps, or a form is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from repeated_blocks import TanhBlock
from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

FORMS: tuple[Execution, ...] = ("compiled", "regional", "model-graph", "compiled+model-graph")
Hang = Callable[[nn.Sequential, list[Any]], object]


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def noted(model: nn.Sequential, calls: list[Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: calls.append(name))


def noted_behind(model: nn.Sequential, calls: list[Any]) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))


def one_of_each(model: nn.Sequential, calls: list[Any]) -> None:
    model[2].bias.register_hook(lambda gradient: calls.append("first"))
    model[0].linear.weight.register_post_accumulate_grad_hook(lambda _: calls.append("last"))


def several_and_one(model: nn.Sequential, calls: list[Any]) -> None:
    pair = [model[0].linear.weight, model[2].weight]
    register_multi_grad_hook(pair, lambda gradients: calls.append("pair"))
    model[1].linear.bias.register_hook(lambda gradient: calls.append("one"))


def first_of_several(model: nn.Sequential, calls: list[Any]) -> None:
    pair = [model[0].linear.weight, model[2].weight]
    register_multi_grad_hook(pair, lambda gradient: calls.append(gradient.shape), mode="any")


def on_one(model: nn.Sequential, calls: list[Any]) -> None:
    for number in range(3):
        model[1].linear.weight.register_hook(lambda _, number=number: calls.append(number))
    model[1].linear.weight.register_post_accumulate_grad_hook(lambda _: calls.append("behind"))


def once_all_are_there(model: nn.Sequential, calls: list[Any]) -> None:
    pair = [model[0].linear.weight, model[2].weight]
    register_multi_grad_hook(pair, lambda gradients: calls.append(len(gradients)))


def clipped(model: nn.Sequential, calls: list[Any]) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model[2].bias.register_hook(lambda gradient: calls.append("bias"))


def train(execution: Execution, hang: Hang, when: int = 0) -> tuple[list[Any], list[Any]]:
    """What hooks noted in some steps, and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(TanhBlock(3), TanhBlock(3), nn.Linear(3, 2))
    optimizer, calls = torch.optim.SGD(model.parameters(), 0.1), list[Any]()
    with (
        emulated_graphs(),
        interpreted(),
        PlannedStep(model, squared, optimizer, Plan(execution=execution), device="cpu") as step,
    ):
        for number in range(4):
            if number == when:
                hang(model, calls)
            step(torch.full((4, 3), 0.1 * (number + 1)))
    return calls, [*model.parameters()]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("execution", FORMS)
@pytest.mark.parametrize("hang", [on_one, once_all_are_there, clipped])
def test_hooks_whose_order_is_of_no_account_are_called(execution: Execution, hang: Hang) -> None:
    wanted, got = train("eager", hang), train(execution, hang)
    assert got[0] == wanted[0]
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("execution", FORMS)
@pytest.mark.parametrize(
    ("hang", "what"),
    [
        (noted, "6 that change something in Python"),
        (noted_behind, "6 that change something in Python"),
        (one_of_each, "2 that change something in Python"),
        (several_and_one, "2 that change something in Python"),
        (first_of_several, "one for the first gradient of several"),
    ],
)
def test_hooks_that_would_be_called_in_another_order_are_refused(
    execution: Execution, hang: Hang, what: str, when: int
) -> None:
    """Also those that come later; nothing has called them then."""
    calls: list[Any] = []
    with pytest.raises(CaptureError) as raised:
        train(execution, lambda model, _: hang(model, calls), when)
    assert calls == []
    text = str(raised.value)
    assert text.startswith(
        f"wanted hooks on gradients whose order is of no account for execution={execution!r}, which hands out "
        f"gradients in another order than the step as written, got {what}, on '"
    )
    assert text.endswith("'; do so after the step, or use execution='eager'")


def test_a_hook_on_a_parameter_of_the_loss_is_refused_by_a_graph() -> None:
    """Replays would not notice a change of what it reads."""
    weight = nn.Parameter(torch.ones(2))
    weight.register_hook(lambda gradient: gradient * 2.0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([*model.parameters(), weight], 0.1)

    def weighted(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * weight).square().mean()

    with (
        emulated_graphs(),
        PlannedStep(model, weighted, optimizer, Plan(execution="graph"), device="cpu") as step,
        pytest.raises(ObstacleError, match="got one on 'a parameter outside of the model'"),
    ):
        step(torch.ones(4, 3))
