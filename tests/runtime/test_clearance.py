"""A graph beside which the optimizer steps is tried in a child process before this one captures it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.lint.child_trial import TrialOutcome
from ridgeline.lint.lint import Lint
from ridgeline.lint.lint_rules import Finding
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs import checked, clearance
from ridgeline.runtime.steps.graphs.clearance import clear_for_capture
from ridgeline.workers.world import World

CPU = torch.device("cpu")
BATCH = torch.ones(4, 2)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


class Signs(torch.optim.SGD):
    """A step of the user's own."""

    def step(self, closure: None = None) -> None:
        raise AssertionError("nobody runs it before it was tried elsewhere")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Limits of the children that were asked for; each ends as `outcome` says."""
    asked: list[float] = []

    def attempt(body: StepBody, batch: Any, plan: Plan, *, limit_s: float = 0.0) -> TrialOutcome:
        asked.append(limit_s)
        return outcomes.pop(0)

    outcomes: list[TrialOutcome] = [
        TrialOutcome("failed", "it was killed by SIGABRT", 3.0),
        TrialOutcome("not-tried", "wanted functions that can be imported", 0.1),
        TrialOutcome("ok", "", 4.2),
    ]
    monkeypatch.setattr(clearance, "try_step_in_child", attempt)
    monkeypatch.setattr(clearance, "_CLEARED", set())
    return asked


def make_body(kind: type[torch.optim.SGD] = Signs) -> StepBody:
    model = nn.Linear(2, 1)
    optimizer = kind(model.parameters(), 0.1)
    return StepBody(model, loss_fn, optimizer, Plan(), None, clip_norm=None, device=CPU)


def test_only_a_child_that_ended_well_clears_it(tried: list[float]) -> None:
    """A crash there, or no trial at all, is a refusal here; one good end stands for its class."""
    world, notes = World(0, 1, 0, CPU), list[str]()
    for words in (
        "failed in a child process: it was killed by SIGABRT",
        "could not be tried in a child process: wanted functions that can be imported",
    ):
        with pytest.raises(ObstacleError) as caught:
            clear_for_capture(make_body(), BATCH, world, notes)
        assert str(caught.value) == (
            f"wanted an optimizer that can step beside a CUDA graph, got Signs, which {words}; use "
            "execution='eager' or another optimizer"
        )
    assert notes == []
    clear_for_capture(make_body(), BATCH, world, notes)
    clear_for_capture(make_body(), BATCH, world, notes)
    assert tried == [clearance.OUTSIDE_LIMIT_S] * 3
    assert notes == [
        "a graph beside the optimizer Signs ran well in a child process (4.2 s)",
    ]


def test_a_child_and_an_optimizer_of_torch_need_none(
    tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child does not start children; torch's only read gradients, also those that no graph holds."""
    world = World(0, 1, 0, CPU)
    body = make_body()
    for kind in (torch.optim.SGD, torch.optim.Adafactor):
        body.optimizer = kind(body.model.parameters(), 0.1)
        clear_for_capture(body, BATCH, world, [])
    monkeypatch.setattr(clearance, "is_trial", lambda: True)
    clear_for_capture(make_body(), BATCH, world, [])
    assert tried == []


def test_several_workers_refuse_one_of_torch_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearance, "largest_of_workers", lambda value, world: value)
    body = make_body()
    body.optimizer = torch.optim.Adafactor(body.model.parameters(), 0.1)
    with pytest.raises(ObstacleError, match="Adafactor"):
        clear_for_capture(body, BATCH, World(0, 2, 0, CPU), [])


def test_several_workers_refuse_it(tried: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives cannot be tried in a child; the message names the optimizer."""
    monkeypatch.setattr(clearance, "largest_of_workers", lambda value, world: value)
    with pytest.raises(ObstacleError, match="an optimizer with a step of torch's own, got Signs"):
        clear_for_capture(make_body(), BATCH, World(0, 2, 0, CPU), [])
    assert tried == []


class Picking(nn.Linear):
    """As many rows as have a positive sum."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.sum(1) > 0.0])


OUTCOMES = {
    TrialOutcome(
        "failed", "it was killed by SIGABRT", 3.0
    ): "failed in a child process: it was killed",
    TrialOutcome(
        "not-tried", "wanted a file", 3.0
    ): "could not be tried in a child process: wanted a file",
    TrialOutcome("ok", "", 4.2): "",
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_child_runs_a_program_whose_shapes_depend_on_values(
    monkeypatch: pytest.MonkeyPatch, outcome: TrialOutcome
) -> None:
    """Such a program may end this process's use of a GPU; that it has such shapes the linter has found."""
    model = Picking(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = Plan(execution="compiled")
    body = StepBody(model, loss_fn, optimizer, plan, None, clip_norm=None, device=CPU)
    with pytest.raises(ObstacleError, match="shapes that do not depend on values"):
        clear_for_capture(body, BATCH, World(0, 1, 0, CPU), [])
    assert body.findings.value_shapes[0].startswith("aten.index at ")
    monkeypatch.setattr(checked, "try_step_in_child", lambda *_: outcome)
    world, notes = World(0, 1, 0, torch.device("cuda")), list[str]()
    runner = checked.CheckedRunner(body, Recorder(HostClock()), world, notes)
    if outcome.status == "ok":
        runner._try_elsewhere(BATCH)
        assert notes == [f"compiled with shapes that depend on values, it {outcome}"]
    else:
        with pytest.raises(CaptureError, match=f"{OUTCOMES[outcome]}.*Such shapes: aten.index at"):
            runner._try_elsewhere(BATCH)


def test_a_compiled_form_takes_activation_checkpoints_if_a_child_does(
    tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step as written asks of the random state is a doubt there, and a refusal where it is captured."""

    def inspect(body: StepBody, batch: Any, device: torch.device) -> Lint:
        return Lint(
            (Finding("checkpoint", "torch.cuda.get_rng_state()", "net.py:3 in forward"),), ()
        )

    monkeypatch.setattr(clearance, "inspect_step", inspect)
    monkeypatch.setattr(clearance, "is_doubtful", lambda lint: bool(lint.doubts))
    world = World(0, 1, 0, CPU)
    body = make_body(torch.optim.SGD)
    with pytest.raises(CaptureError) as caught:
        clear_for_capture(body, BATCH, world, [])
    assert str(caught.value).endswith(
        "- wanted activation checkpoints that keep no random state, got torch.cuda.get_rng_state() at net.py:3 in "
        "forward: reading and putting back the state is host work, refused in a capture; give them "
        "preserve_rng_state=False if they hold no dropout, or use execution='compiled+graph': there the "
        "compiler may keep what was drawn"
    )
    assert tried == []
    body.plan = Plan(execution="compiled+graph")
    with pytest.raises(CaptureError, match="it was killed by SIGABRT"):
        clear_for_capture(body, BATCH, world, [])
    notes = list[str]()
    tried.clear()
    outcomes = [TrialOutcome("ok", "", 4.2)]
    monkeypatch.setattr(clearance, "try_step_in_child", lambda *given: outcomes.pop())
    clear_for_capture(body, BATCH, world, notes)
    assert "".join(notes) == (
        "doubtful capture ran well in a child process (4.2 s); doubts: an activation checkpoint at net.py:3 in "
        "forward"
    )
