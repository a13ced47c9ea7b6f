"""What a step copies from the host is no obstacle for a compiled one that takes nothing from there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.guards.reading import read_program
from ridgeline.lint.lint import Lint
from ridgeline.lint.lint_rules import Finding
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs import clearance
from ridgeline.runtime.steps.graphs.clearance import clear_for_capture
from ridgeline.runtime.steps.whole_step.reads import StepReads, loss_program
from ridgeline.workers.world import World

META = torch.device("meta")
BATCH = torch.ones(4, 2)
OUTSIDE = torch.ones(2)
SCALE = 3


class Scaled(nn.Module):
    """A layer and a number of the host's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device=device)


def makes_constants(model: nn.Module, batch: Tensor) -> Tensor:
    """As relative positions are computed: on the host, of numbers, then moved."""
    steps = torch.arange(2) * torch.log(torch.tensor(SCALE / 2))
    return (model.layer(batch) * steps.to(batch.device)).square().mean()


def takes_constants(model: nn.Module, batch: Tensor) -> Tensor:
    return (model.layer(batch) * OUTSIDE.to(batch.device)).square().mean()


def takes_a_number(model: nn.Module, batch: Tensor) -> Tensor:
    return (model.layer(batch) * model.factor).square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "takes_host"),
    [(makes_constants, False), (takes_constants, True), (takes_a_number, True)],
)
def test_what_a_program_takes_from_the_host_is_seen(loss_fn: Any, takes_host: bool) -> None:
    """Tensors of a global or of the model, of any size; not those that it makes of numbers."""
    model = Scaled(META)
    model.factor = torch.tensor(2.0)
    arguments = {"loss_fn": loss_fn, "model": model, "batch": torch.ones(4, 2, device=META)}
    assert read_program(loss_program, arguments).takes_host is takes_host


def cleared(
    monkeypatch: pytest.MonkeyPatch, execution: Execution, rules: list[str], takes_host: bool
) -> None:
    """Clear a step in which the linter found something, and the compiler reads something."""
    found = tuple(Finding(rule, "aten._to_copy", f"net.py:{i}") for i, rule in enumerate(rules))
    monkeypatch.setattr(clearance, "inspect_step", lambda *_, **__: Lint(found, ()))
    monkeypatch.setattr(StepReads, "takes_host", takes_host)
    model = Scaled(torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    device = torch.device("cpu")
    plan = Plan(execution=execution)
    body = StepBody(model, makes_constants, optimizer, plan, None, clip_norm=None, device=device)
    clear_for_capture(body, BATCH, World(0, 1, 0, device), [])


COPIES = ["unpinned-copy", "host-tensor"]


def test_a_compiled_step_that_takes_nothing_from_the_host_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleared(monkeypatch, "compiled+graph", COPIES, takes_host=False)


@pytest.mark.parametrize(
    ("execution", "rules", "takes_host"),
    [
        ("compiled+graph", COPIES, True),
        ("compiled+graph", [*COPIES, "host-sync"], False),
        ("graph", [*COPIES, "host-sync"], False),
    ],
)
def test_other_steps_with_such_copies_are_not(
    monkeypatch: pytest.MonkeyPatch, execution: Execution, rules: list[str], takes_host: bool
) -> None:
    """What lies on the host may change; what waits for the device does so compiled as well."""
    with pytest.raises(ObstacleError, match=r"got \d obstacles"):
        cleared(monkeypatch, execution, rules, takes_host)


def test_copies_in_a_step_as_written_are_no_obstacle_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a compiled one is tried: it is refused as what fails in this mode alone."""
    with pytest.raises(CaptureError, match="got 2 obstacles") as caught:
        cleared(monkeypatch, "graph", COPIES, takes_host=False)
    assert not isinstance(caught.value, ObstacleError)
