"""The traced order is that of real eager execution: operators, gradients, optimizer."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from reference_models import (
    TiedLanguageModel,
    image_batch,
    image_loss,
    language_batch,
    language_loss,
    mlp,
    resnet,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ridgeline as rl


class RealOps(TorchDispatchMode):
    """Names of the operators that a real step issues, without autograd's own detached copies."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        excluded = torch._C._dispatch_tls_local_exclude_set()
        is_copy = str(func) == "aten.detach.default" and not excluded.has(
            torch._C.DispatchKey.ADInplaceOrView
        )
        if func.namespace == "aten" and not is_copy:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


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
    """Custom autograd, recomputation, a buffer updated without gradients, a constant, frozen parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6).requires_grad_(False)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.ReLU(inplace=True))
        self.last = nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, Sine.apply(self.first(x)), use_reentrant=False)
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


rows = (torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 4)
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
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 9)).to(
            memory_format=torch.channels_last
        ),
        image_loss,
        image_batch(4, side=8, classes=9),
    ),
    "float64": (lambda: mlp().double(), image_loss, [rows[0].double(), rows[1]]),
    "sparse gradient": (
        lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 4)),
        image_loss,
        (torch.arange(24).view(8, 3) % 9, rows[1]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_operators_and_gradients_come_as_in_a_real_run(case: str) -> None:
    """Operators and gradient-ready order equal those of a real eager step, one by one."""
    make, loss_fn, batch = CASES[case]
    model = make()
    optimizer = sgd(model)
    workload = rl.trace(model, loss_fn, optimizer, batch)
    ready: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    for _ in range(2):  # the second step is a steady one
        optimizer.zero_grad()
        ready.clear()
        real = RealOps()
        with real:
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
    assert [op.name for op in workload.ops] == real.names
    assert workload.ready_order == tuple(ready)
    assert workload.dependency_source == "make_fx"
    assert workload.notes == ()


def test_operators_are_those_the_profiler_sees() -> None:
    """Without any dispatch mode torch's profiler sees the traced operators, in this order."""
    model = resnet((1,), bottleneck=False, width=4, classes=10)
    batch = image_batch(4, side=16)
    optimizer = sgd(model)
    workload = rl.trace(model, image_loss, optimizer, batch)
    for _ in range(2):
        optimizer.zero_grad()
        with profile() as profiler:
            image_loss(model, batch).backward()
            optimizer.step()
    seen = [event.name for event in profiler.events() if event.name.startswith("aten::")]
    remaining = iter(seen)
    traced = [f"aten::{op.name.split('.')[1]}" for op in workload.ops]
    missing = [name for name in traced if name not in remaining]
    assert missing == []
    # Operators that no other one calls inside: not one more or less than traced.
    for name in ("aten::detach", "aten::mm", "aten::convolution", "aten::threshold_backward"):
        assert Counter(traced)[name] == Counter(seen)[name], name


def test_ready_op_is_the_op_that_completed_the_gradient() -> None:
    """Every gradient is ready in backward, in ready order; what gets none says -1."""
    model = TiedLanguageModel()
    model.blocks[0].norm1.requires_grad_(False)
    workload = rl.trace(model, language_loss, sgd(model), language_batch())
    ready = [parameter.ready_op for parameter in workload.gradients]
    assert ready == sorted(ready)
    assert {workload.ops[op].phase for op in ready} == {"backward"}
    without = {p.name for p in workload.parameters if p.ready_op == -1}
    assert without == {"unused.weight", "unused.bias", "blocks.0.norm1.weight", "blocks.0.norm1.bias"}
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


def test_recomputation_belongs_to_its_module() -> None:
    """What a checkpoint runs again in backward is backward, in the module that is run again."""
    model = Peculiar()
    workload = rl.trace(model, image_loss, sgd(model), rows)
    again = [op.module for op in workload.phase("backward") if op.name == "aten.addmm.default"]
    assert again == ["inner.0"]
