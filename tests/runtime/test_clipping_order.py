"""A total norm is summed up in the order of the model's parameters, as scripts write it, whatever the groups."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Plan
from ridgeline.runtime.steps.body.clipped import ClippedParameters
from ridgeline.runtime.steps.step import PlannedStep

BATCHES = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(10)]


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A deep model, whose optimizer has biases, then the last layers' weights, then the first ones'."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(12)]
    model = nn.Sequential(*layers)
    flat = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": flat, "weight_decay": 0.0},
        {"params": matrices[::-1], "weight_decay": 0.05},
    ]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_clipped_training_is_that_of_a_plain_loop_bit_for_bit() -> None:
    """With parameters in groups, too: the order of a sum decides its last bits."""
    model, optimizer = make()
    for batch in BATCHES:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    ours, our_optimizer = make()
    with PlannedStep(ours, loss_fn, our_optimizer, Plan(), clip_norm=0.05, device="cpu") as step:
        for batch in BATCHES:
            step(batch)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(), strict=True)
    )


def test_parameters_come_in_the_order_of_the_model() -> None:
    model, optimizer = make()
    clipped = ClippedParameters(model)
    wanted = list(map(id, model.parameters()))
    assert list(map(id, clipped.of(optimizer))) == wanted
    assert list(map(id, clipped.of(optimizer))) == wanted


def test_a_method_of_that_name_may_be_the_models_own() -> None:
    class Own(nn.Linear):
        def parameters(self, group: str) -> dict[str, Any]:  # type: ignore[override]
            return {group: self.weight}

    model = Own(2, 2)
    optimizer = torch.optim.SGD([model.bias, model.weight], 0.1)
    assert [*map(id, ClippedParameters(model).of(optimizer))] == [id(model.weight), id(model.bias)]


@pytest.mark.parametrize("is_late", [False, True])
def test_parameters_of_an_optimizer_that_are_not_the_models_come_last(is_late: bool) -> None:
    """Whenever they were added; a model's own that the optimizer does not have are not clipped."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    others = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD([others[0]] if not is_late else model[1].parameters(), lr=0.1)
    clipped = ClippedParameters(model)
    if is_late:
        clipped.of(optimizer)
        optimizer.add_param_group({"params": [others[0]]})
    else:
        optimizer.add_param_group({"params": model[1].parameters()})
    optimizer.add_param_group({"params": [others[1], model[0].bias]})
    wanted = [model[0].bias, model[1].weight, *others]
    assert list(map(id, clipped.of(optimizer))) == list(map(id, wanted))
