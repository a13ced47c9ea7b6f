"""Optimizers that differentiate gradients again, as AdaHessian does, train as in a loop of one's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.errors import CaptureError, PlanError
from ridgeline.optimizer_forms import differentiates_gradients
from ridgeline.runtime.steps.body.requirements import check_second_order


class Curved(torch.optim.Optimizer):
    """Divides gradients by an estimate of the curvature, from a random direction, as AdaHessian does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def curvature(self, params: list[Tensor]) -> list[Tensor]:
        grads = [p.grad for p in params if p.grad is not None]
        signs = [2 * torch.randint_like(p, high=2) - 1 for p in params]
        return [*torch.autograd.grad(grads, params, grad_outputs=signs, only_inputs=True)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            products = self.curvature(group["params"])
            with torch.no_grad():
                for p, product in zip(group["params"], products, strict=True):
                    p.sub_(p.grad / (product.abs() + 0.1), alpha=group["lr"])


class Told(Curved):
    """Says so, as timm's does, and hides how."""

    is_second_order = True


class Numbers(Curved):
    is_second_order = False


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def make(kind: type[Curved] = Curved) -> tuple[nn.Module, Curved]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, kind(model.parameters())


@pytest.mark.parametrize("kind", [Curved, Told])
@pytest.mark.parametrize("plan", ["auto", rl.Plan()], ids=["auto", "eager"])
def test_they_train_as_in_a_plain_loop_bit_for_bit(plan: Any, kind: type[Curved]) -> None:
    batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    model, optimizer = make(kind)
    torch.manual_seed(1)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward(create_graph=True)
        optimizer.step()
    drawn = torch.rand(1)
    ours, our_optimizer = make(kind)
    torch.manual_seed(1)
    with rl.TrainStep(
        ours, loss_fn, our_optimizer, plan, device="cpu", seconds=5.0, progress=str
    ) as step:
        for batch in batches:
            step(batch)
        assert step.plan.execution == "eager"
    assert torch.equal(torch.rand(1), drawn)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    our_optimizer.zero_grad()
    optimizer.zero_grad()


@pytest.mark.parametrize("execution", ["compiled", "step-graph"])
def test_forms_that_hand_out_numbers_are_refused_by_name(execution: Any) -> None:
    model, optimizer = make()
    with pytest.raises(CaptureError) as caught:
        rl.TrainStep(model, loss_fn, optimizer, rl.Plan(execution=execution), device="cpu")
    assert str(caught.value) == (
        f"wanted an optimizer that takes gradients as they are for execution={execution!r}, got Curved, "
        "which differentiates them again; use execution='eager'"
    )


def test_averaged_gradients_are_refused_by_name() -> None:
    _, optimizer = make()
    with pytest.raises(PlanError) as caught:
        check_second_order(optimizer, rl.Plan(workers=2), num_workers=2)
    assert str(caught.value) == (
        "wanted a single worker for Curved, which differentiates gradients again, got workers=2; averaged "
        "gradients have no graph: use another optimizer, or one worker"
    )


def test_an_optimizer_may_say_whether_it_does() -> None:
    """What its code looks like counts where it does not."""
    assert differentiates_gradients(make()[1])
    assert differentiates_gradients(make(Told)[1])
    assert not differentiates_gradients(make(Numbers)[1])
    parameter = nn.Parameter(torch.ones(1))
    assert not differentiates_gradients(torch.optim.AdamW([parameter]))
    assert not differentiates_gradients(torch.optim.LBFGS([parameter]))
