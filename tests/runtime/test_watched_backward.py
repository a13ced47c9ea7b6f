"""Backward passes that Python watches run as autograd's own, whatever the plan says."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.capture.capturing import ANOMALIES, SAVED_AS_WRITTEN, SAVED_ON_THE_WAY
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

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
