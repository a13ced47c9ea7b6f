"""Hooks of torch's that put a layer's weight there in each call, in steps as one program."""

from collections.abc import Callable

import pytest
import torch
from step_pairs import STEP_GRAPH
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.runtime.steps.step import PlannedStep

BEGIN = (
    "wanted a step that changes tensors only, got one that changes model.0.weight (a Linear), which one "
    "program would never do again; "
)
ADVICE = "make the attribute of a tensor a buffer (register_buffer), do it after each training step, or use"
OTHERWISE = " execution='compiled' or 'eager'"


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def refusal(model: nn.Module) -> str:
    """Of the second step, since the first one runs as written."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, squared, optimizer, STEP_GRAPH) as step:
        step(torch.ones(2, 4))
        with pytest.raises(CaptureError) as caught:
            step(torch.ones(2, 4))
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize("function", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_refusal_names_what_shows_no_weight(function: Callable[[nn.Module], nn.Module]) -> None:
    """A user of these functions has written no attribute."""
    name = function.__name__
    assert refusal(nn.Sequential(function(nn.Linear(4, 4)))) == (
        f"{BEGIN}torch.nn.utils.{name} puts the weight there in each call, so use "
        f"torch.nn.utils.parametrizations.{name}, or{OTHERWISE}"
    )


def test_hooks_of_others_are_refused_as_before() -> None:
    """Nothing is known that would do the same."""
    layer = nn.Linear(4, 4)
    layer.raw = nn.Parameter(torch.ones(4, 4))
    del layer.weight
    layer.register_forward_pre_hook(lambda module, _: setattr(module, "weight", 2 * module.raw))
    wanted = f"{BEGIN}{ADVICE}{OTHERWISE}"
    assert refusal(nn.Sequential(layer)) == wanted


class Keeping(nn.Linear):
    """Shows what it gave."""

    def forward(self, x: Tensor) -> Tensor:
        self.given = super().forward(x)
        return self.given


def test_a_tensor_that_is_kept_is_advised_to_be_a_buffer() -> None:
    """Those are renewed by the program: statistics of a batch, spikes, what attention saw."""
    kept = BEGIN.replace("model.0.weight (a Linear)", "model.given (a Keeping)")
    assert refusal(Keeping(4, 4)) == f"{kept}{ADVICE}{OTHERWISE}"
    model = Keeping(4, 4)
    model.register_buffer("given", None, persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with PlannedStep(model, squared, optimizer, STEP_GRAPH) as step:
        for scale in (1.0, 2.0, 3.0):
            step(torch.full((2, 4), scale))
            torch.testing.assert_close(model.given, model(torch.full((2, 4), scale)))
