"""What hooks on gradients hold is in the reach of a step: trials leave nothing there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.reach.undo import undone
from ridgeline.runtime.steps.step import PlannedStep

Register = Callable[[nn.Module, Callable[..., None]], Any]
KINDS: dict[str, Register] = {
    "of a tensor": lambda m, hook: [p.register_hook(hook) for p in m.parameters()],
    "after accumulation": lambda m, hook: [
        p.register_post_accumulate_grad_hook(hook) for p in m.parameters()
    ],
    "of all": lambda m, hook: register_multi_grad_hook([*m.parameters()], hook),
    "of any": lambda m, hook: register_multi_grad_hook([*m.parameters()], hook, mode="any"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def _watched(kind: str) -> tuple[nn.Module, list[int]]:
    model, seen = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), list[int]()

    def hook(*_: Any) -> None:
        seen.append(1)

    KINDS[kind](model, hook)
    return model, seen


@kinds
def test_what_a_hook_notes_is_undone(kind: str) -> None:
    """The list holds what it held."""
    model, seen = _watched(kind)
    with undone(model):
        model(torch.ones(2, 3)).sum().backward()
        assert seen
    assert seen == []


def _compiled_step(model: nn.Module) -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    from torch._inductor import config

    with (
        config.patch(compile_threads=1),
        PlannedStep(model, loss_fn, optimizer, Plan(execution="compiled"), device="cpu") as step,
    ):
        step(torch.ones(2, 3))


@kinds
def test_trials_leave_nothing(kind: str) -> None:
    """After a compiled step a hook has noted what it notes in one plain step, and nothing where it is refused."""
    model, seen = _watched(kind)
    if kind == "of all":
        _compiled_step(model)
        assert seen == [1]
        return
    # Several notes into one list would be in another order.
    with pytest.raises(
        CaptureError, match="wanted hooks on gradients whose order is of no account"
    ):
        _compiled_step(model)
    assert seen == []


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_one_parameter_is_called_once(name: str) -> None:
    """In the step that is taken, and in no trial of it."""
    model, seen = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), list[int]()

    def hook(_: Tensor) -> None:
        seen.append(1)

    getattr(model[0].weight, name)(hook)
    _compiled_step(model)
    assert seen == [1]
