"""A run of unknown length begins without a compiler, and tries it when it has lasted as long as compiling takes."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from planned_candidates import make_candidate
from ridgeline.decision import choice, revisions
from ridgeline.decision.revisions import Revisions
from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.planner import Candidate, Ranking, choose
from ridgeline.planner.deferred_compiling import REASON
from ridgeline.planner.preparation import is_compiled
from ridgeline.timeline import Timeline
from ridgeline.workers.world import World
from strategies import make_machine, make_workload

EAGER_S = 1.0
"""What trials find, so that a few steps are as long as compiling."""
MANY = 100


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.last(self.first(x).tanh()), 0.2)


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batch(index: int) -> Tensor:
    return torch.full((4, 6), 0.1 * (index % 7))


def plain_losses(steps: int) -> list[float]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    torch.manual_seed(1)
    losses = []
    for index in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model, batch(index))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trials(monkeypatch: pytest.MonkeyPatch, compiled_s: float | None) -> list[str]:
    """Have trials find these seconds a step; None: nothing compiles. The modes that were tried."""
    tried: list[str] = []

    def trial(make: Any, plan: Plan, *others: Any) -> Timeline:
        tried.append(plan.execution)
        if is_compiled(plan) and compiled_s is None:
            raise CaptureError("no compiler here")
        step_s = compiled_s if is_compiled(plan) else EAGER_S
        measured = make_candidate(plan.execution, step_s, is_measured=True).measured
        return msgspec.structs.replace(measured, steps_ns=(round(step_s * 1e9),) * 5)

    monkeypatch.setattr(choice, "run_trial", trial)
    return tried


def trained(**settings: Any) -> tuple[list[float], list[str], rl.TrainStep]:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    machine = make_machine(settings=[rl.machine.Setting(device="cpu", workers=1, threads=1)])
    torch.manual_seed(1)
    with rl.TrainStep(
        model,
        loss_fn,
        optimizer,
        machine=machine,
        device="cpu",
        progress=lambda _: None,
        **settings,
    ) as step:
        losses, executions = [], []
        for index in range(MANY):
            losses.append(step(batch(index)).item())
            executions.append(step.plan.execution)
        return losses, executions, step


def test_a_long_run_goes_on_with_what_compiles_where_that_is_faster(monkeypatch) -> None:
    tried = trials(monkeypatch, 0.1 * EAGER_S)
    losses, executions, step = trained()
    assert losses == pytest.approx(plain_losses(MANY), rel=1e-4)
    switched = next(i for i, execution in enumerate(executions) if execution != "eager")
    assert 0 < switched < MANY
    assert set(executions[switched:]) == {executions[switched]}
    compiling_s = min(
        c.timeline.counters["compile_s"] for c in step.ranking.candidates if is_compiled(c.plan)
    )
    assert switched == pytest.approx(compiling_s / EAGER_S, abs=1)
    assert step.notes[0] == REASON
    assert tried[0] == "eager"


@pytest.mark.parametrize("compiled_s", [2.0 * EAGER_S, None], ids=["slower", "fails"])
def test_it_goes_on_as_it_was_where_that_is_slower_or_fails(monkeypatch, compiled_s) -> None:
    tried = trials(monkeypatch, compiled_s)
    losses, executions, step = trained()
    assert losses == plain_losses(MANY)
    assert set(executions) == {"eager"}
    assert REASON not in step.notes
    assert tried.count("compiled") == 1


def test_workers_that_train_alone_are_not_asked_again() -> None:
    """They hold different parameters, from which no other plan goes on."""
    machine = make_machine(latency_s=1e-4, bandwidth=2e6)
    workload = make_workload(forward=[10**8] * 4)
    world = SimpleNamespace(kind="cpu")
    is_over = []
    for allow in ((), ("local-steps",)):
        ranking = choose(machine, workload, world_size=2, fixed={"threads": 1}, allow=allow)
        ranking = msgspec.structs.replace(ranking, candidates=_eager_tried(ranking))
        made = SimpleNamespace(steps=None, seconds=None, world=world)
        is_over.append(Revisions(made, ranking).is_over)  # type: ignore[arg-type]
    assert is_over == [False, True]


def test_a_batch_that_failed_on_one_worker_counts_on_none(monkeypatch) -> None:
    """That worker would choose again a step before the others."""
    monkeypatch.setattr(revisions, "steps_before_compiling", lambda *_, **__: 3)
    asked: list[int] = []
    made = SimpleNamespace(
        steps=None,
        seconds=None,
        world=World.join(device="cpu"),
        rank_with_compiled=lambda ranking, batch: asked.append(batch) or ranking,
    )
    one = make_candidate("eager", EAGER_S, is_measured=True)
    due = Revisions(made, Ranking(candidates=(one,), error=0.1)).due  # type: ignore[arg-type]
    for number, num_steps in enumerate([0, 0, 1, 1, 2, 3]):
        due(number, num_steps)
    assert asked == [5]


def _eager_tried(ranking: Ranking) -> tuple[Candidate, ...]:
    """The candidates, of which the best that compiles nothing was tried and stands first."""
    best = next(c for c in ranking.candidates if not is_compiled(c.plan))
    tried = msgspec.structs.replace(best, measured=best.timeline)
    return (tried, *(c for c in ranking.candidates if c is not best))


@pytest.mark.parametrize("settings", [{"steps": MANY}, {"seconds": 1.0}], ids=["steps", "seconds"])
def test_who_says_how_long_it_may_take_is_not_asked_again(monkeypatch, settings) -> None:
    tried = trials(monkeypatch, 0.1 * EAGER_S)
    losses, executions, _ = trained(**settings)
    assert losses == plain_losses(MANY)
    assert set(executions) == {"eager"}
    assert set(tried) <= {"eager"}  # a busy machine leaves no time for a trial within a second
