"""Parameters that share memory, or have state of another type, are not updated by one fused kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.errors import PlanError
from ridgeline.lint.lint import inspect_step
from ridgeline.optimizers.capturable import make_capturable, make_fused
from ridgeline.optimizers.fused_limits import why_not_fused
from ridgeline.optimizers.optimizer_calls import update
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda p: Adagrad(p, 0.05, weight_decay=0.01),
    "AdamW": lambda p: AdamW(p, 0.01, weight_decay=0.1),
}
makers = pytest.mark.parametrize("name", MAKERS)


def pair(first: Tensor, second: Tensor) -> list[nn.Parameter]:
    """Two parameters in the memory of those tensors."""
    return [nn.Parameter(first), nn.Parameter(second)]


SHARED: dict[str, Callable[[Tensor], list[nn.Parameter]]] = {
    "all": lambda t: pair(t, t.view(-1)),
    "turned": lambda t: pair(t.mT, t),
    "a row": lambda t: pair(t[3], t),
    "overlapping rows": lambda t: pair(t[2:], t[:3]),
}
APART: dict[str, Callable[[Tensor], list[nn.Parameter]]] = {
    "rows": lambda t: pair(t[2:], t[:2]),
    "copies": lambda t: pair(t, t.clone()),
    "empty": lambda t: pair(t, t[:0]),
}


@pytest.mark.parametrize("how", SHARED)
@makers
def test_parameters_that_share_memory_are_not_fused(how: str, name: str) -> None:
    """They are named; an optimizer with another form for captures takes that."""
    optimizer = MAKERS[name](SHARED[how](torch.randn(5, 5)))
    group = optimizer.param_groups[0]
    assert why_not_fused(optimizer, group) == "parameters 0 and 1 share memory"
    [said] = make_fused(optimizer, CPU)
    assert said.endswith("does not use its fused form: parameters 0 and 1 share memory")
    assert not group["fused"]
    if name == "AdamW":
        make_capturable(optimizer, CPU)
        assert group["capturable"]
        assert not group["fused"]
    else:
        with pytest.raises(PlanError, match="parameters 0 and 1 share memory"):
            make_capturable(optimizer, CPU)


@pytest.mark.parametrize("how", APART)
@makers
def test_neighbours_are_fused(how: str, name: str) -> None:
    """Views of one memory that have no element in common."""
    optimizer = MAKERS[name](APART[how](torch.randn(5, 5)))
    assert why_not_fused(optimizer, optimizer.param_groups[0]) is None
    make_fused(optimizer, CPU)
    assert optimizer.param_groups[0]["fused"]


def test_memory_counts_to_the_last_element_behind_gaps() -> None:
    """And is not read by somebody else's count of elements."""
    memory = torch.randn(5, 5)
    for columns, row, shares in (
        (memory[:, 1:3], memory[4], True),
        (memory[:4, 1:3], memory[4], False),
    ):
        optimizer = SGD(pair(columns, row), 0.1)
        assert (why_not_fused(optimizer, optimizer.param_groups[0]) is not None) == shares


def test_groups_are_updated_one_after_another() -> None:
    """So that two groups may share memory; counts of steps are of their own type."""
    first, second = SHARED["all"](torch.randn(5, 5))
    optimizer = AdamW([{"params": [first]}, {"params": [second]}], 0.01)
    first.grad, second.grad = torch.randn(5, 5), torch.randn(25)
    optimizer.step()
    for group in optimizer.param_groups:
        assert why_not_fused(optimizer, group) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_momenta_of_another_type_are_updated_as_torch_does(dtype: torch.dtype) -> None:
    """Also where the user had asked for the fused form."""
    trained = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = SGD(layer.parameters(), 0.05, momentum=0.9, fused=is_fused)
        for index in range(4):
            layer.to(dtype if index > 1 else torch.float32)
            layer(torch.ones(2, 3, dtype=layer.weight.dtype)).sum().backward()
            update(optimizer) if is_fused else optimizer.step()
        trained.append(layer.weight.detach())
    torch.testing.assert_close(trained[1], trained[0])


def test_negative_views_are_not_fused() -> None:
    """The fused kernels refuse to write them."""
    parameter = nn.Parameter(torch._neg_view(torch.randn(4, 4)))
    optimizer = SGD([parameter], 0.1, momentum=0.9)
    [said] = make_fused(optimizer, CPU)
    assert said.endswith("does not use its fused form: parameter 0 is a view of its negative")


def _squares(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("is_added", [False, True])
def test_groups_with_sparse_gradients_are_not_fused(is_added: bool) -> None:
    """Known when the first one is there, also of a group that the script adds later."""
    trained = []
    for form in ("as-is", "fused"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        groups = [{"params": part.parameters()} for part in model]
        optimizer = SGD(groups[1:] if is_added else groups, 0.1)
        with PlannedStep(model, _squares, optimizer, Plan(optimizer=form)) as step:
            for index in range(3):
                step(torch.tensor([index, 4, 4]))
                if is_added and index == 0:
                    optimizer.add_param_group({"params": [*model[0].parameters()]})
        trained.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0])
    number = int(is_added)
    assert [bool(group["fused"]) for group in optimizer.param_groups] == [is_added, not is_added]
    wanted = f"optimizer group {number} does not use its fused form: the gradient of parameter 0 is sparse"
    assert wanted in step.notes


def test_an_optimizer_outside_of_a_graph_is_updated_as_one_inside() -> None:
    """With a method of its own, and then without the momentum of one parameter."""
    trained = []
    for execution in ("eager", "graph"):
        torch.manual_seed(0)
        model = _model()
        optimizer = SGD(model.parameters(), 0.05, momentum=0.9, fused=True)
        with (
            emulated_graphs(),
            PlannedStep(model, _loss, optimizer, Plan(execution=execution)) as step,
        ):
            for index in range(12):
                if index == 5:
                    plain = optimizer.step
                    optimizer.step = lambda *a, _plain=plain: _plain(*a)  # type: ignore[method-assign]
                if index == 9:
                    optimizer.state.pop(model[0][0].weight)
                step(torch.randn(3, 4))
        trained.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-6)


def test_a_lint_says_why_the_optimizer_stays_outside() -> None:
    """Before anything is captured, and without changing the optimizer."""
    model = _model()
    _share(model)
    optimizer = MAKERS["SGD"](model.parameters())
    with PlannedStep(model, _loss, optimizer, Plan(execution="eager"), device="cpu") as step:
        found = inspect_step(step._body, torch.randn(3, 4), device="cpu")
    assert "parameters 0 and 2 share memory" in str(found)
    assert not optimizer.param_groups[0]["fused"]


def _loss(model: Any, x: Tensor) -> Tensor:
    return (model(x.to(model[0][0].weight.dtype)) - 0.5).square().mean()


def _model() -> Any:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(4, 2))


def _to_double(model: Any) -> None:
    model.double()


def _share(model: Any) -> None:
    model[1][0].weight.data = model[0][0].weight.data


def _part(model: Any) -> None:
    model[1][0].weight.data = model[1][0].weight.data.clone()


def _trained(
    execution: Execution, name: str, changes: dict[int, Callable[[Any], None]]
) -> tuple[list[Tensor], bool, list[str]]:
    torch.manual_seed(0)
    model = _model()
    optimizer = MAKERS[name](model.parameters())
    with PlannedStep(model, _loss, optimizer, Plan(execution=execution), device="cpu") as step:
        losses = []
        for index in range(14):
            changes.get(index, lambda _: None)(model)
            losses.append(step(torch.randn(3, 4)).float())
        is_fused = bool(optimizer.param_groups[0]["fused"])
        return [*losses, *(p.detach() for p in model.parameters())], is_fused, step.notes


CHANGES: dict[str, tuple[str, dict[int, Callable[[Any], None]], bool, str]] = {
    "double": ("SGD", {6: _to_double}, False, "momentum_buffer of parameter 0 is torch.float32"),
    "double, before the capture": ("SGD", {2: _to_double}, False, "is torch.float32"),
    "shared": ("SGD", {6: _share}, False, "parameters 0 and 2 share memory"),
    "shared, before the capture": ("SGD", {2: _share}, False, "parameters 0 and 2 share memory"),
    "shared at first": ("SGD", {0: _share}, False, "parameters 0 and 2 share memory"),
    "shared, parted": ("SGD", {6: _share, 9: _part}, True, "parameters 0 and 2 share memory"),
    "shared, capturable": ("AdamW", {6: _share}, False, "captured again"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("execution", ["graph", "compiled+graph", "regional+graph"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
def test_captured_steps_go_back(execution: Execution, change: str) -> None:
    """The optimizer then steps outside of the graph, and inside again once nothing keeps it."""
    name, changes, is_fused, why = CHANGES[change]
    wanted, *_ = _trained("eager", name, changes)
    with interpreted(), emulated_graphs():
        got, fused_at_last, notes = _trained(execution, name, changes)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    assert fused_at_last == is_fused
    assert any(why in note for note in notes)


def test_memory_that_comes_to_be_shared_later_is_not_fused() -> None:
    """Whether parameters fit is asked again once one of them has moved."""
    parameters = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))]
    optimizer = torch.optim.SGD(parameters, 0.1, fused=True)
    for step in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(8)
        if step:
            parameters[1].data = parameters[0].data
        update(optimizer)
        assert optimizer.param_groups[0]["fused"] is (step == 0)
    assert torch.allclose(parameters[0], torch.full((8,), 0.7))


def test_what_is_not_torchs_parameter_keeps_its_state() -> None:
    """An optimizer of somebody's may keep state by name, and be called fused."""
    parameter = nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9, fused=True)
    optimizer.state["notes"] = {"seen": torch.ones(3, 5).t()}  # type: ignore[index] - a name
    update(optimizer)
    assert optimizer.state["notes"]["seen"].stride() == (1, 5)  # type: ignore[index]
