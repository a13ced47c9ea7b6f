"""Products with the whole number 0 stay products: what is no number does not become 0 by compiling."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ridgeline.packages.aot import compile_program
from ridgeline.packages.package import load_compiled
from ridgeline.plan import Execution, Plan
from ridgeline.programs import inductor
from ridgeline.runtime.steps.step import PlannedStep

PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "number last": lambda x: x * 0,
    "number first": lambda x: 0 * x,
    "in place": lambda x: x.clone().mul_(0),
    "guarded": lambda x: torch.where(torch.isfinite(x), x, x * 0),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("is_trained", [True, False])
def test_products_with_zero_are_those_as_written(name: str, is_trained: bool) -> None:
    """Signs of zeros, too, and gradients."""
    function = PRODUCTS[name]
    compiled = torch.compile(function, **inductor.plain_arguments())
    results = []
    for call in (function, compiled):
        x = torch.tensor([1.0, -2.0, math.inf, -math.inf, math.nan], requires_grad=is_trained)
        found = call(x)
        gradients = torch.autograd.grad(found.sum(), x) if is_trained else ()
        results.append([found.detach(), found.detach().signbit() & ~found.isnan(), *gradients])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


def test_products_of_whole_numbers_keep_their_type() -> None:
    compiled = torch.compile(PRODUCTS["number last"], **inductor.plain_arguments())
    x = torch.tensor([3, -4])
    torch.testing.assert_close(compiled(x), x * 0, rtol=0, atol=0)


def test_packaged_programs_keep_them(tmp_path: Path) -> None:
    x = torch.tensor([1.0, math.inf, math.nan])
    graph = torch.fx.symbolic_trace(PRODUCTS["number last"])
    call = load_compiled(compile_program(graph, [x], tmp_path), torch.device("cpu"))
    torch.testing.assert_close(call([x])[0], x * 0, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("execution", ["compiled", "step-graph"])
def test_a_loss_that_is_no_number_is_none_when_compiled(execution: Execution) -> None:
    """A loss times 0 where it is not finite is NaN as it was written, however that was meant."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        return torch.where(torch.isfinite(loss), loss, loss * 0)

    results = []
    for name in ("eager", execution):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with PlannedStep(model, loss_fn, optimizer, Plan(execution=name), device="cpu") as step:
            batches = (*[torch.ones(3, 4)] * 3, torch.full((3, 4), math.inf))
            results.append([torch.stack([step(batch) for batch in batches]), model.weight.detach()])
    assert results[0][0].isnan().tolist() == [False] * 3 + [True]
    torch.testing.assert_close(results[1], results[0], equal_nan=True)
