"""The traced order is that of real eager execution: operators, gradients, optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from real_run import differences, profile_step
from reference_models import (
    TiedLanguageModel,
    image_batch,
    image_loss,
    language_batch,
    language_loss,
    mlp,
    resnet,
    rows,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ridgeline as rl


class Sine(torch.autograd.Function):
    """A sine with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


class Peculiar(nn.Module):
    """Custom autograd, a buffer updated without gradients, a constant, frozen and in-place parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).requires_grad_(False)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.ReLU(inplace=True))
        self.last = nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(Sine.apply(self.first(x)))
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.last(x - self.average.detach()) * torch.tensor([1.0, 2.0, 3.0, 4.0])


def mixed_precision_loss(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return image_loss(model, batch)


def penalty_loss(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].detach().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, batch[1]) + slope.square().mean()


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor], Any]
CASES: dict[str, Case] = {
    "mlp": (mlp, image_loss, rows),
    "resnet": (
        lambda: resnet((1, 1), bottleneck=False, width=4, classes=10),
        image_loss,
        image_batch(4, side=32),
    ),
    "tied": (TiedLanguageModel, language_loss, language_batch()),
    "peculiar": (Peculiar, image_loss, rows),
    "mixed precision": (mlp, mixed_precision_loss, rows),
    "gradient penalty": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()), penalty_loss, rows),
    "channels last": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 9)
        ).to(memory_format=torch.channels_last),
        image_loss,
        image_batch(4, side=8, classes=9),
    ),
    "float64": (lambda: mlp().double(), image_loss, [rows[0].double(), rows[1]]),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_and_gradients_come_as_in_a_real_run(case: str) -> None:
    """Operators and gradient-ready order equal those of a real eager step, one by one."""
    make, loss_fn, batch = CASES[case]
    model = make()
    optimizer = sgd(model)
    workload = rl.trace(model, loss_fn, optimizer, batch)
    ready: list[str] = []
    for _ in range(2):  # the second step is a steady one
        events = profile_step(model, loss_fn, optimizer, batch)
    assert differences(events, workload.ops) == []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    loss_fn(model, batch).backward()
    assert workload.ready_order == tuple(ready)
    assert workload.notes == ()


class TwoWeights(nn.Module):
    """Applies a function to a linear layer's output and two more parameters."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.p, self.q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(torch.relu(self.linear(x)), self.p, self.q)


class Adding(torch.autograd.Function):
    """A function whose backward itself adds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient + (gradient * 2 + x)


SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "two uses": lambda h, p, q: h.sin() * h.cos() + (p * q).sum(),
    "three uses": lambda h, p, q: h.sin() + h.cos() + h.tanh() * p * q,
    "square": lambda h, p, q: (h * h) * (p + q),
    "same operand twice": lambda h, p, q: (h + h).sin() * p * q,
    "broadcast gradient": lambda h, p, q: h + h.sin() + (p * q).sum(),
    "gradient shared by parameters": lambda h, p, q: h * ((p + q).relu() + p * q),
    "residuals": lambda h, p, q: (h + (h + h.sin() * p).cos() * q).relu(),
    "transposed": lambda h, p, q: (h.t() @ h) * p * q,
    "views": lambda h, p, q: h[:, :2] * h[:, 2:] + (h.t().relu().t() * p * q)[:, :2],
    "custom function": lambda h, p, q: Adding.apply(h) * Adding.apply(h.relu()) * p * q,
    "formula that adds": lambda h, p, q: torch.var_mean(h * p * q, 0)[0] * torch.var_mean(h, 0)[1],
    "both moments": lambda h, p, q: sum(torch.var_mean(h * p * q, 0)) * torch.ones(4, 1),
    "fused formula": lambda h, p, q: torch.addcdiv(h, h, h.exp()) + h.std() + p * q,
}


@pytest.mark.parametrize("case", SUMS)
def test_gradients_add_up_in_place_where_autograd_does(case: str) -> None:
    """Sums of gradients are in place or not exactly as in real backward passes."""
    function = SUMS[case]
    model = TwoWeights(lambda h, p, q: function(h, p, q).sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.linspace(-1, 1, 16).view(4, 4)

    def loss_fn(m: nn.Module, b: Any) -> Tensor:
        return m(b)

    workload = rl.trace(model, loss_fn, optimizer, batch)
    assert differences(profile_step(model, loss_fn, optimizer, batch), workload.ops) == []


def test_the_comparison_can_fail() -> None:
    """A missing, an extra and a misplaced operator are all found."""
    model = mlp()
    optimizer = sgd(model)
    ops = list(rl.trace(model, image_loss, optimizer, rows).ops)
    for _ in range(2):
        events = profile_step(model, image_loss, optimizer, rows)
    assert differences(events, ops) == []
    mm = next(i for i, op in enumerate(ops) if op.name == "aten.mm.default")
    assert differences(events, ops[:mm] + ops[mm + 1 :])
    assert differences(events, [*ops[:mm], ops[mm], *ops[mm:]])
    assert differences(events, [*ops[:mm], ops[mm + 1], ops[mm], *ops[mm + 2 :]])


def test_ready_op_is_the_op_that_completed_the_gradient() -> None:
    """Every gradient is ready in backward, in ready order; what gets none says -1."""
    model = TiedLanguageModel()
    model.blocks[0].norm1.requires_grad_(False)
    workload = rl.trace(model, language_loss, sgd(model), language_batch())
    ready = [parameter.ready_op for parameter in workload.gradients]
    assert ready == sorted(ready)
    assert {workload.ops[op].phase for op in ready} == {"backward"}
    without = {p.name for p in workload.parameters if p.ready_op == -1}
    assert without == {
        "unused.weight",
        "unused.bias",
        "blocks.0.norm1.weight",
        "blocks.0.norm1.bias",
    }
    assert "head.weight" not in {p.name for p in workload.parameters}  # tied: named table.weight
    assert workload.ready_order[-1] == "table.weight"


def test_phases_and_modules() -> None:
    """Phases follow one another, and backward ops belong to the module that made their node."""
    model = mlp()
    workload = rl.trace(model, image_loss, sgd(model), rows)
    phases = [op.phase for op in workload.ops]
    assert phases == sorted(phases, key=("forward", "backward", "optimizer").index)
    where = {(op.phase, op.name, op.module) for op in workload.ops}
    assert ("forward", "aten.relu.default", "1") in where
    assert ("backward", "aten.threshold_backward.default", "1") in where
    assert ("forward", "aten.nll_loss_forward.default", "") in where
    modules = [op.module for op in workload.phase("backward") if op.name == "aten.mm.default"]
    assert modules == ["2", "2", "0"]


class Recomputing(nn.Module):
    """Keeps no activations of its first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=False))


def test_recomputation_belongs_to_its_module() -> None:
    """What a checkpoint runs again in backward is backward, in the module that is run again."""
    model = Recomputing()
    workload = rl.trace(model, image_loss, sgd(model), rows)
    again = [op.module for op in workload.phase("backward") if op.name == "aten.addmm.default"]
    assert again == ["first.0"]


def test_sparse_gradients() -> None:
    """An embedding with sparse gradients is traced, and its table is ready last."""
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 4))
    batch = (torch.arange(24).view(8, 3) % 9, rows[1])
    workload = rl.trace(model, image_loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    assert workload.ready_order == ("2.bias", "2.weight", "0.weight")
    assert len(workload.phase("optimizer")) == 3
