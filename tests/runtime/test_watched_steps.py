"""Steps that Python watches, or keeps something of, run as they were written, whatever the plan says."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.capture.capturing import (
    ANOMALIES,
    SAVED_AS_WRITTEN,
    SAVED_ON_THE_WAY,
    WEIGHTS_CACHED,
)
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tracing.capture import trace

REPLAYED: tuple[Execution, ...] = (
    *("step-graph", "packaged", "graph", "model-graph"),
    *("compiled+graph", "regional+graph", "compiled+model-graph"),
)
COMPILED: tuple[Execution, ...] = ("compiled", "regional")


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    with interpreted(), emulated_graphs():
        yield


def squares(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def trained(execution: Execution) -> tuple[list[Tensor], int, list[str]]:
    """Losses, calls of a hook on saved tensors that is there in some steps, and notes."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, packed = [], list[int]()
    x = torch.randn(3, 4)

    def pack(tensor: Tensor) -> Tensor:
        packed.append(1)
        return tensor * 2

    with PlannedStep(model, squares, optimizer, Plan(execution=execution), device="cpu") as step:
        for index in range(12):
            if index in (1, 8, 9):
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    losses.append(step(x))
            else:
                losses.append(step(x))
        with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="nan"):
            step(x * torch.nan)
        return losses, len(packed), step.notes


@pytest.mark.parametrize("execution", [*REPLAYED, *COMPILED])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
def test_hooks_on_saved_tensors_are_called_and_anomalies_found(execution: Execution) -> None:
    """No graph and no program does either, and compiled code saves other tensors; other steps stay as they are."""
    wanted, got = trained("eager"), trained(execution)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-6)
    assert got[1] == wanted[1] > 0
    noted = {SAVED_AS_WRITTEN} if execution in COMPILED else {SAVED_ON_THE_WAY, ANOMALIES}
    assert noted <= {*got[2]}
    assert any("equals the eager step" in note for note in got[2])


def with_computed_weight() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("execution", ["step-graph", "graph", "model-graph", "compiled"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
def test_steps_inside_of_cached_weights_run_once(execution: Execution, first: int) -> None:
    """A second one would go backward through the graph of the cached weights once more."""
    losses: dict[Execution, list[Tensor]] = {"eager": [], execution: []}
    for name, found in losses.items():
        model, optimizer = with_computed_weight()
        with PlannedStep(model, squares, optimizer, Plan(execution=name), device="cpu") as step:
            for index in range(8):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
                if index in (first, 6):
                    with parametrize.cached():
                        found.append(step(x))
                else:
                    found.append(step(x))
            assert name == "eager" or WEIGHTS_CACHED in step.notes
    torch.testing.assert_close(*losses.values(), rtol=1e-4, atol=1e-6)


def cached_squares(model: nn.Module, batch: Any) -> Tensor:
    with parametrize.cached():
        return squares(model, batch) + squares(model, -batch)


@pytest.mark.parametrize("execution", ["step-graph", "graph", "compiled"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
def test_a_loss_function_caches_weights_in_a_program(execution: Execution) -> None:
    """Each use leaves the cache empty, so that what it writes there is nobody's state."""
    losses: dict[Execution, list[Tensor]] = {"eager": [], execution: []}
    for name, found in losses.items():
        model, optimizer = with_computed_weight()
        plan = Plan(execution=name)
        with PlannedStep(model, cached_squares, optimizer, plan, device="cpu") as step:
            for index in range(6):
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
                found.append(step(x))
            assert WEIGHTS_CACHED not in step.notes
    torch.testing.assert_close(*losses.values(), rtol=1e-4, atol=1e-6)


def test_a_trace_leaves_cached_weights() -> None:
    """They are the caller's, of a forward pass before."""
    model, optimizer = with_computed_weight()
    with parametrize.cached():
        before = model[0].weight
        trace(model, squares, optimizer, torch.randn(3, 4), may_run=True)
        assert model[0].weight is before
        squares(model, torch.randn(3, 4)).backward()
