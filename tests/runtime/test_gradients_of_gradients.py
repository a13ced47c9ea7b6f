"""Penalties on gradients, as critics have: forms without gradients of gradients are refused by name."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional as of_autograd

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from repeated_blocks import TanhBlock
from ridgeline.errors import CaptureError
from ridgeline.execution import MODES
from ridgeline.plan import Execution, Plan
from ridgeline.reach.second_gradients import retained_graphs, second_gradients
from ridgeline.session import TrainStep

WITHOUT: tuple[Execution, ...] = (
    "compiled", "regional", "compiled+graph", "regional+graph", "model-graph", "compiled+model-graph",
)  # fmt: skip


def critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(TanhBlock(3), TanhBlock(3), nn.Linear(3, 1))


def slopes(model: nn.Module, batch: Tensor) -> Tensor:
    points = batch.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
    return slope.norm(dim=1)


def penalty(model: nn.Module, batch: Tensor) -> Tensor:
    """What keeps the slope of a critic near one."""
    return (slopes(model, batch) - 1).square().mean() + model(batch).mean()


class Lazily:
    """A penalty in each third step only."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.calls += 1
        return model(batch).mean() if self.calls % 3 else self.regularized(model, batch)

    def regularized(self, model: nn.Module, batch: Tensor) -> Tensor:
        return slopes(model, batch).square().mean() + model(batch).mean()


@pytest.mark.parametrize("execution", WITHOUT)
@pytest.mark.parametrize("make", [lambda: penalty, Lazily], ids=["always", "lazily"])
def test_forms_without_them_are_refused_before_a_step(
    execution: Execution, make: Callable[[], Any]
) -> None:
    """A lazy penalty failed in the middle of training, by an error of torch, after parts of the step."""
    model, loss_fn = critic(), make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with emulated_graphs(), interpreted(), pytest.raises(CaptureError) as raised:
        TrainStep(model, loss_fn, optimizer, Plan(execution=execution), device="cpu").__call__(
            torch.ones(5, 3)
        )
    assert str(raised.value) == (
        f"wanted a step without gradients of gradients for execution={execution!r}, got create_graph=True or "
        "torch.autograd.functional in slopes (test_gradients_of_gradients.py:33); use "
        "execution='eager', or 'step-graph' (on a GPU 'graph', too) where it can be one program"
    )
    assert getattr(loss_fn, "calls", 0) == 0


def of_the_batch(model: nn.Module, batch: Tensor) -> Tensor:
    """As physics-informed networks have it: the batch itself is what the model is differentiated by."""
    values = model(batch.requires_grad_(True))
    (slope,) = torch.autograd.grad(values.sum(), batch, create_graph=True)
    return slope.square().mean() + values.mean()


@pytest.mark.parametrize(
    ("execution", "loss_fn"),
    [
        *((name, penalty) for name in MODES if name not in (*WITHOUT, "script")),
        ("graph", of_the_batch),
    ],
)
def test_the_other_forms_have_them(
    execution: Execution, loss_fn: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    """As exactly as the eager step."""
    ends = []
    for name in ("eager", execution):
        model = critic()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with (
            emulated_graphs(),
            interpreted(),
            TrainStep(model, loss_fn, optimizer, Plan(execution=name), device="cpu") as step,
        ):
            losses = [step(torch.ones(5, 3) * index) for index in range(1, 5)]
        ends.append([*losses, *model.parameters()])
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_captured_model_is_not_differentiated_twice() -> None:
    """Where the code does not show it: autograd would take what was replayed for constants."""

    def hidden(model: nn.Module, batch: Tensor) -> Tensor:
        points = batch.clone().requires_grad_(True)
        found = vars(torch.autograd)["gr" + "ad"]
        (slope,) = found(model(points).sum(), points, None, True, True)
        return (slope.norm(dim=1) - 1).square().mean() + model(batch).mean()

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        emulated_graphs(),
        TrainStep(model, hidden, optimizer, Plan(execution="model-graph"), device="cpu") as step,
        pytest.raises(
            CaptureError, match="create_graph=True, and the graph that is replayed has none"
        ),
    ):
        [step(torch.ones(5, 3)) for _ in range(6)]


class Field(nn.Module):
    """A potential whose forces are its slopes, as in models of molecules."""

    def forward(self, x: Tensor) -> Tensor:
        return self.forces(x)

    def forces(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sum(), x, create_graph=self.training)[0]


class Unused(nn.Module):
    """Has a method that no step calls."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def forces(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(x.sum(), x, create_graph=True)[0]

    def curvature(self, x: Tensor) -> Tensor:
        return slope(self, x)


class Held(nn.Module):
    """Calls a function that it holds."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self, x)


def slope(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.autograd.grad(batch.sum(), batch, create_graph=True)[0]


def imported(model: nn.Module, batch: Tensor) -> Tensor:
    import penalties  # type: ignore[import-not-found]

    return penalties.slope(model, batch)


def plain(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def backwards(model: nn.Module, batch: Tensor) -> Tensor:
    model(batch).mean().backward(create_graph=True)
    return model(batch).mean()


def given_later(model: nn.Module, batch: Tensor) -> Tensor:
    settings = {"create_graph": True}
    return torch.autograd.grad(model(batch).mean(), batch, **settings)[0].mean()


def by_place(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.autograd.grad(model(batch).mean(), batch, None, None, True)[0].mean()


def by_a_name_of_its_own(model: nn.Module, batch: Tensor) -> Tensor:
    find = torch.autograd.grad
    return find(model(batch).mean(), batch, None, None, not model.training or True)[0].mean()


def unpacked(model: nn.Module, batch: Tensor) -> Tensor:
    rest = (None, None, True)
    return torch.autograd.grad(model(batch).mean(), batch, *rest)[0].mean()


def backwards_by_place(model: nn.Module, batch: Tensor) -> Tensor:
    model(batch).mean().backward(None, None, True)
    return model(batch).mean()


def all_backwards(model: nn.Module, batch: Tensor) -> Tensor:
    torch.autograd.backward(model(batch).mean(), None, None, True if model.training else None)
    return model(batch).mean()


def products(model: nn.Module, batch: Tensor) -> Tensor:
    return of_autograd.vhp(lambda x: model(x).sum(), batch, batch)[1].mean()


def written_out(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.autograd.functional.vhp(lambda x: model(x).sum(), batch, batch)[1].mean()


def imported_here(model: nn.Module, batch: Tensor) -> Tensor:
    from torch import autograd

    return autograd.functional.vhp(lambda x: model(x).sum(), batch, batch)[1].mean()


def beside(model: nn.Module, batch: Tensor) -> Tensor:
    mask = torch.autograd.Variable(torch.ones_like(batch))
    return model(torch.nn.functional.dropout(mask) * batch).mean()


def once(model: nn.Module, batch: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(
        model(batch).mean(), batch, create_graph=False, retain_graph=True
    )
    return model(batch).mean() + slope.mean()


def once_by_place(model: nn.Module, batch: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(model(batch).mean(), batch, None, True, False)
    return model(batch).mean() + slope.mean()


def kept(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).mean()
    loss.backward(retain_graph=True)
    return loss


def kept_by_place(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).mean()
    torch.autograd.backward([loss], None, True)
    return loss


def not_kept(model: nn.Module, batch: Tensor) -> Tensor:
    model(batch).mean().backward(None, False)
    torch.autograd.backward([model(batch).mean()], None)
    torch.autograd.grad(model(batch).mean(), [*model.parameters()], None, None)
    return model(batch).mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        *(backwards, given_later, products, written_out, by_place, by_a_name_of_its_own, unpacked),
        *(backwards_by_place, all_backwards, imported_here),
    ],
)
def test_each_way_to_ask_for_them_is_found(loss_fn: Callable[..., Tensor]) -> None:
    assert second_gradients(critic(), loss_fn).startswith(f"{loss_fn.__name__} (")
    assert second_gradients(critic(), lambda model, batch: 2 * loss_fn(model, batch))


@pytest.mark.parametrize(
    ("passed", "is_found"), [("create_graph=True", True), ("retain_graph=True", False)]
)
def test_code_without_source_asks_by_what_it_names(passed: str, is_found: bool) -> None:
    """Such as a function that `exec` made."""
    names: dict[str, Any] = {}
    exec(f"def typed(model, batch):\n    model(batch).mean().backward({passed})", names)
    assert second_gradients(critic(), names["typed"]) == "typed (<string>:1)" * is_found


def test_methods_count_where_they_are_called() -> None:
    assert second_gradients(Field(), plain).startswith("forces (")
    assert second_gradients(nn.Sequential(Field()), plain).startswith("forces (")
    assert not second_gradients(Unused(), plain)
    assert not second_gradients(critic(), once)
    assert not second_gradients(critic(), once_by_place)
    assert not second_gradients(critic(), not_kept)
    assert not second_gradients(critic(), beside)


def test_functions_of_modules_count_where_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that no step calls may name them, too."""
    module = types.ModuleType("penalties")
    vars(module).update(slope=slope, __file__=__file__)
    monkeypatch.setitem(sys.modules, "penalties", module)
    assert not second_gradients(Unused(), plain)
    assert second_gradients(critic(), imported).startswith("slope (")
    assert second_gradients(critic(), lambda model, batch: 2 * slope(model, batch))
    for held in (slope, functools.partial(slope), [slope], (slope,)):
        assert second_gradients(Held(held), plain).startswith("slope (")


@pytest.mark.parametrize("loss_fn", [once, once_by_place, kept, kept_by_place])
def test_a_second_backward_pass_through_a_call_is_found(loss_fn: Callable[..., Tensor]) -> None:
    assert retained_graphs(critic(), loss_fn).startswith(f"{loss_fn.__name__} (")
    assert not retained_graphs(critic(), not_kept)


@pytest.mark.parametrize("execution", WITHOUT)
def test_forms_whose_calls_have_one_backward_pass_are_refused_before_a_step(
    execution: Execution,
) -> None:
    """In each fourth step it ended training, by an error of torch or of the captured model."""
    number = [0]

    def lazily(model: nn.Module, batch: Tensor) -> Tensor:
        number[0] += 1
        return model(batch).mean() if number[0] % 4 else kept(model, batch)

    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with emulated_graphs(), interpreted(), pytest.raises(CaptureError) as raised:
        TrainStep(model, lazily, optimizer, Plan(execution=execution), device="cpu")
    text = str(raised.value)
    assert text.startswith(
        f"wanted a step with one backward pass through each call for execution={execution!r}, got "
        "retain_graph=True in kept (test_gradients_of_gradients.py:"
    )
    assert "); use execution='eager', or 'step-graph' (on a GPU 'graph', too) where" in text


def branching(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    return loss if loss > 0 else -loss


def branching_penalty(model: nn.Module, batch: Tensor) -> Tensor:
    return branching(model, batch) + penalty(model, batch)


@pytest.mark.parametrize(
    ("loss_fn", "instead"),
    [
        (branching, "execution='compiled', which leaves that to Python, or 'eager'"),
        (branching_penalty, "execution='eager'"),
    ],
)
def test_what_cannot_be_read_is_not_sent_where_it_is_refused(loss_fn: Any, instead: str) -> None:
    """A compiled step takes what one program cannot be read for, but no gradients of gradients."""
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(execution="step-graph")
    with TrainStep(model, loss_fn, optimizer, plan, device="cpu") as step:
        step(torch.randn(4, 3))
        with pytest.raises(CaptureError) as caught:
            step(torch.randn(4, 3))
    assert str(caught.value).endswith(f"; use {instead}")


def test_a_step_that_is_no_program_is_not_sent_to_a_form_that_refuses_it() -> None:
    """Of the advice to compile or to run eagerly only the latter takes gradients of gradients."""
    model = critic()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(model, Lazily(), optimizer, Plan(execution="step-graph"), device="cpu")
    step(torch.ones(5, 3))
    with pytest.raises(CaptureError, match=r"calls .* use execution='eager'$"):
        step(torch.ones(5, 3))
