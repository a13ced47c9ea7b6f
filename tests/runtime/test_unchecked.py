"""Value checks of torch.distributions are off in captured and compiled steps, said, and on everywhere else."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from emulated_graphs import emulated_graphs
from ridgeline.capture.unchecked import NOTE, unchecked
from ridgeline.lint.lint import inspect_step
from ridgeline.plan import Execution, Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.whole_step.program import trace_body
from ridgeline.session import TrainStep


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    """Of samples under a normal distribution whose scale the model gives; below 0 there is none."""
    return -Normal(0.0, model(batch)).log_prob(batch).mean()


def make_body(execution: Execution, notes: list[str]) -> StepBody:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.bias, 3.0)
    return StepBody(
        model,
        likelihood,
        torch.optim.SGD(model.parameters(), 0.1),
        Plan(execution=execution),
        None,
        clip_norm=None,
        device=torch.device("cpu"),
        notes=notes,
    )


@pytest.fixture(autouse=True)
def checks_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start of a process: torch's compiler switches them off for all of it."""
    monkeypatch.setattr(Distribution, "_validate_args", True)


def test_eager_steps_check() -> None:
    """As without us: a scale below 0 is refused."""
    body = make_body("eager", [])
    nn.init.constant_(body.model.bias, -3.0)
    with pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
        body(torch.ones(4, 1), Recorder(HostClock()))


def test_compiled_steps_do_not_and_say_so() -> None:
    """The reference for a compiled step leaves the checks out as well, and notes it once."""
    notes: list[str] = []
    body = make_body("compiled", notes)
    for _ in range(2):
        with body.as_written():
            body(torch.ones(4, 1), Recorder(HostClock()))
    assert notes.count(NOTE) == 1
    assert Distribution._validate_args is True


def test_a_step_as_one_program_leaves_them_out() -> None:
    """A program cannot wait for what it computes: the trace finds nothing that reads a value."""
    body = make_body("step-graph", [])
    batch = torch.ones(4, 1)
    body(batch, Recorder(HostClock()))
    names = {str(node.target) for node in trace_body(body, batch).graph.graph.nodes}
    assert "aten.log.default" in names
    assert not {name for name in names if "all_true" in name or "local_scalar" in name}


def test_nothing_is_said_where_nothing_was_left_out() -> None:
    """Without a distribution, or where the user had switched the checks off."""
    notes: list[str] = []
    with unchecked(notes):
        torch.ones(2).sum()
    Distribution.set_default_validate_args(False)
    try:
        with unchecked(notes):
            Normal(0.0, 1.0)
        assert Distribution._validate_args is False
    finally:
        Distribution.set_default_validate_args(True)
    assert notes == []


def test_given_by_hand_they_stay() -> None:
    """`validate_args=True` is the user's own wish."""
    with unchecked([]), pytest.raises(ValueError, match="Expected parameter scale"):
        Normal(torch.zeros(1), torch.tensor([-1.0]), validate_args=True)


@pytest.mark.parametrize(("execution", "rules"), [("graph", []), ("eager", ["host-sync"])])
def test_a_graph_finds_no_obstacle_in_them(execution: Execution, rules: list[str]) -> None:
    """What waits for the device in an eager step is not there in the one that is captured."""
    body = make_body(execution, [])
    body._checks_values = execution == "eager"  # on a host without a GPU no step is captured
    lint = inspect_step(body, torch.ones(4, 1), device="cpu")
    assert sorted({one.rule for one in lint.findings}) == rules


@pytest.mark.parametrize("execution", ["graph", "model-graph"])
def test_a_step_with_distributions_is_captured(execution: Execution) -> None:
    """Its replays find the losses of steps that were not captured, and it is said what they leave out."""
    batch = torch.linspace(-1.0, 1.0, 4)[:, None]
    body = make_body("eager", [])
    initial = {name: value.clone() for name, value in body.model.state_dict().items()}
    plain = [body(batch, Recorder(HostClock())).item() for _ in range(6)]
    body.model.load_state_dict(initial)
    with (
        emulated_graphs(),
        TrainStep(
            body.model, likelihood, body.optimizer, Plan(execution=execution), device="cpu"
        ) as step,
    ):
        replayed = [step(batch).item() for _ in range(6)]
        notes = step.notes
    assert replayed == pytest.approx(plain, rel=1e-5)
    assert NOTE in notes
