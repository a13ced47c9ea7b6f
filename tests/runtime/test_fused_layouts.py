"""Fused optimizers on a CPU train parameters in any layout as the plain loop does."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.optimizer_forms import is_dense, takes_fused_form
from ridgeline.optimizers.optimizer_calls import update

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **more: torch.optim.SGD(p, 0.1, momentum=0.9, **more),
    "adam": lambda p, **more: torch.optim.Adam(p, 0.1, amsgrad=True, **more),
    "adagrad": lambda p, **more: torch.optim.Adagrad(p, 0.1, **more),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": Tensor.contiguous,
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}


def stepped(name: str, before: str, after: str, gradient: str, *, fused: bool) -> Tensor:
    """A matrix after four steps; its layout changes after two."""
    torch.manual_seed(0)
    parameter = nn.Parameter(LAYOUTS[before](torch.randn(5, 7)))
    optimizer = OPTIMIZERS[name]([parameter], fused=fused)
    for index in range(4):
        if index == 2:
            parameter.data = LAYOUTS[after](parameter.data)
        parameter.grad = LAYOUTS[gradient](torch.randn(5, 7))
        update(optimizer)
    return parameter.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(layouts=st.tuples(*[st.sampled_from([*LAYOUTS])] * 3))
def test_layouts_do_not_matter(name: str, layouts: tuple[str, str, str]) -> None:
    """Of the parameter before and after its state was made, and of the gradient."""
    wanted, got = (stepped(name, *layouts, fused=fused) for fused in (False, True))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def released_later(*, fused: bool) -> list[Tensor]:
    """Two parameters, one of which has no gradient before the third step, nor later the momentum it had."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5, fused=fused)
    for index in range(8):
        for parameter in parameters if index > 1 else parameters[:1]:
            parameter.grad = torch.full_like(parameter, index + 1.0)
        if index == 5:
            del optimizer.state[parameters[0]]
        update(optimizer)
        assert optimizer.param_groups[0]["fused"] is fused
    return [parameter.detach() for parameter in parameters]


def test_momenta_that_some_parameters_lack_begin_with_their_gradients() -> None:
    """As in torch's plain form; the fused one would raise."""
    torch.testing.assert_close(released_later(fused=True), released_later(fused=False))


class OnGpu(nn.Parameter):
    """A parameter that says of itself that it lies on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def refusing(parameters: list[Tensor], *beside: list[Tensor], **_: Any) -> None:
    """What the kernels for GPUs ask of a parameter and what they are given beside it."""
    for parameter, *others in zip(parameters, *filter(None, beside[:3]), strict=True):
        if any(other.stride() != parameter.stride() for other in others):
            raise RuntimeError("params, grads, exp_avgs, and exp_avg_sqs must have same layout")


@pytest.mark.parametrize(("name", "kernel"), [("sgd", "_fused_sgd_"), ("adam", "_fused_adam_")])
def test_kernels_for_gpus_get_nothing_that_they_refuse(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a parameter's strides change after its state was made, or its gradient has others."""
    monkeypatch.setattr(torch, kernel, refusing)
    parameter = OnGpu(torch.randn(5, 7))
    optimizer = OPTIMIZERS[name]([parameter], fused=True)
    for layout, gradient in itertools.product(("dense", "transposed"), repeat=2):
        parameter.data = LAYOUTS[layout](parameter.data)
        parameter.grad = LAYOUTS[gradient](torch.randn(5, 7))
        update(optimizer)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), max_size=3))
def test_dense_are_those_whose_elements_fill_their_memory(
    dimensions: list[tuple[int, int]],
) -> None:
    """Each place from the first to the last once, whatever sizes and strides are."""
    sizes, strides = [d[0] for d in dimensions], [d[1] for d in dimensions]
    tensor = torch.arange(50).as_strided(sizes, strides)
    places = sorted(tensor.flatten().tolist())
    assert is_dense(tensor) == (places == [*range(tensor.numel())])


def test_no_optimizer_is_switched_to_kernels_that_walk_over_gaps() -> None:
    parameter = nn.Parameter(torch.zeros(4, 8)[:, :3])
    group = torch.optim.Adam([parameter]).param_groups[0]
    assert not takes_fused_form("Adam", group)


def test_a_step_with_a_fused_optimizer_takes_state_of_another_layout() -> None:
    """As a checkpoint brings it that was saved in another one."""
    results = []
    for form in ("as-is", "fused"):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        plan = rl.Plan(optimizer=form)
        with rl.TrainStep(model, lambda m, x: m(x).square().mean(), optimizer, plan) as step:
            for index in range(6):
                if index == 3:
                    first = optimizer.state[model.weight]
                    first["exp_avg"] = LAYOUTS["transposed"](first["exp_avg"])
                step(torch.randn(4, 6, generator=torch.Generator().manual_seed(index)))
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
