"""Compiled gradients of extremes in 16 bits: numbers, and those of the step as written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.errors import EquivalenceError
from ridgeline.plan import Execution, Plan
from ridgeline.programs.extremes import rounding_options
from ridgeline.runtime.steps.step import PlannedStep

EMULATED = {"emulate_precision_casts": True}

ROWS = (torch.arange(8) % 3)[:, None, None]

EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(1),
    "amin of two": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x + 1.0),
    "norm": lambda x: x.norm(float("inf"), dim=1),
    "vector norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "distance": lambda x: torch.dist(x, 2.0 * x, float("inf")),
    "median": lambda x: x.median(),
    "scattered": lambda x: torch.zeros_like(x).scatter_reduce(0, ROWS.expand_as(x), x, "amax"),
    "indexed": lambda x: torch.zeros_like(x).index_reduce_(0, ROWS[:, 0, 0], x, "amin"),
}


class Network(nn.Module):
    """A layer whose activation no kernel writes before its extremes are there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 24), nn.LayerNorm(24)
        self.gain = nn.Parameter(torch.ones(len(EXTREMES)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.leaky_relu(self.norm(self.layer(x)), 0.2)
        values = [find(hidden).float().square().mean() for find in EXTREMES.values()]
        return (torch.stack(values) * self.gain).sum()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def trained(execution: Execution, batch: Tensor) -> list[Tensor]:
    """The parameters after two steps in bfloat16."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = PlannedStep(model, loss_of, optimizer, plan=Plan(execution=execution, precision="bf16"))
    try:
        for _ in range(2):
            step(batch)
    finally:
        step.close()
    return [p.detach() for p in model.parameters()]


@pytest.mark.xfail(
    torch.__version__ < "2.12",
    raises=EquivalenceError,
    strict=True,
    reason="the C++ of torch 2.11 leaves out what a program rounds: such steps are refused",
)
@pytest.mark.parametrize("execution", ["compiled", "step-graph"])
def test_gradients_of_extremes_are_numbers(execution: Execution) -> None:
    """Kernels compare an extreme of 16 bits with elements that they have rounded as well."""
    batch = torch.randn(8, 12, 16, generator=torch.Generator().manual_seed(1))
    both = [trained(each, batch) for each in (execution, "eager")]
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("is_made_of_operators", [False, True])
def test_every_extreme_has_its_graph_rounded(name: str, is_made_of_operators: bool) -> None:
    """As TorchDynamo writes it, and as operators with their gradients."""
    find = EXTREMES[name]
    if is_made_of_operators:
        graph: Any = make_fx(lambda x: torch.autograd.grad(find(x).sum(), x))(
            torch.ones(8, 12, 24, requires_grad=True)
        )
    else:
        graph = fx.symbolic_trace(find)
    assert rounding_options(graph) == EMULATED


def test_graphs_within_graphs_are_looked_at() -> None:
    """Such as those of blocks that are computed again in backward."""
    inner = fx.symbolic_trace(lambda x: x.amax(0))
    outer = fx.symbolic_trace(nn.Sequential(nn.Identity()))
    outer.add_module("inner", inner)
    assert rounding_options(outer) == EMULATED
    both = fx.symbolic_trace(lambda x: torch.aminmax(x)[0])  # it has a gradient since torch 2.12
    assert rounding_options(both) == EMULATED


@pytest.mark.parametrize(
    "find",
    [
        lambda x: torch.relu(x).sum().log(),
        lambda x: x.max(1).values + torch.min(x, 1)[0],
        lambda x: torch.max(x, 2.0 * x) + torch.median(x, dim=1).values,
        lambda x: nn.functional.normalize(x) + x.norm() + torch.dist(x, 2.0 * x),
        lambda x: torch.zeros_like(x).scatter_reduce(0, ROWS.expand_as(x), x, "mean"),
    ],
)
def test_other_programs_compute_as_the_compiler_likes(find: Callable[[Tensor], Tensor]) -> None:
    """Rounding costs time: places have gradients of their own, and other norms divide by no count."""
    assert rounding_options(fx.symbolic_trace(find)) == {}
