"""Batches of many shapes are noticed, and the plan is chosen again by trials on several of them."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from planned_candidates import make_candidate
from ridgeline.decision import choice
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.decision.varied import (
    MANY_SHAPES,
    REASON,
    WATCHED_STEPS,
    ShapeWatch,
    for_many_shapes,
)
from ridgeline.errors import CaptureError
from ridgeline.plan import Execution, Plan
from ridgeline.planner import Ranking
from ridgeline.timeline import Timeline
from strategies import make_machine

MEASURED: dict[Execution, float] = {"step-graph": 1.0, "compiled": 2.0, "eager": 3.0}


def ranking(*executions: Execution, measured: bool = True) -> Ranking:
    """In this order."""
    candidates = [make_candidate(e, MEASURED[e], is_measured=measured) for e in executions]
    return Ranking(candidates=tuple(candidates), error=0.1)


def chosen_again(before: Ranking, steps: dict[str, float], told: list[str]) -> Ranking:
    """By trials that take so many seconds a step; what is not named fails."""

    def trial(plan: Plan) -> Timeline:
        if plan.execution not in steps:
            raise CaptureError("no way")
        return make_candidate(plan.execution, steps[plan.execution], is_measured=True).measured  # type: ignore[return-value]

    return for_many_shapes(before, trial, Heartbeat(None), told.append)


@pytest.mark.parametrize(
    ("sizes", "is_varied"),
    [
        ((8,), False),
        ((8, 8, 8, 3), False),
        ((8, 7, 6), False),
        ((8, 7, 6, 5), True),
        (range(16), True),
    ],
)
def test_many_shapes_are_told_from_a_last_batch(sizes: Any, is_varied: bool) -> None:
    """After a number of steps, once; with a batch of each shape, not more than are tried."""
    watch = ShapeWatch()
    batches = [torch.empty(sizes[index % len(sizes)], 2) for index in range(WATCHED_STEPS)]
    assert [watch.is_over(b) for b in batches] == [False] * (WATCHED_STEPS - 1) + [True]
    assert watch.is_varied == is_varied
    assert [len(b) for b in watch.examples] == [*dict.fromkeys(map(len, batches))][:MANY_SHAPES]
    # Where those of another worker vary, steps are as many as there.
    enough = [len(b) for b in watch.enough_examples()]
    assert len(enough) == MANY_SHAPES
    assert {*enough} == {*map(len, watch.examples)}


def test_the_fastest_on_many_shapes_comes_first() -> None:
    """Only what takes any shape is tried; the reason stands in plan and notes."""
    told: list[str] = []
    before = ranking("step-graph", "compiled", "eager")
    after = chosen_again(before, {"eager": 4.0, "compiled": 5.0, "step-graph": 0.1}, told)
    assert [c.plan.execution for c in after.candidates] == ["eager", "step-graph", "compiled"]
    assert after.best.measured is not None
    assert after.best.step_s == 4.0
    assert after.explain("execution").startswith(
        "execution = eager (set by search)\n  batches have"
    )
    assert after.notes[-1] == REASON
    assert sum(line.startswith("trying") for line in told) == 2
    again = chosen_again(before, {"eager": 4.0, "compiled": 2.0}, told)
    assert again.best.plan.execution == "compiled"


def test_nothing_is_compiled_that_was_not_compiled_before() -> None:
    """A plan that does not compile was chosen where compiling is not allowed, or does not pay."""
    told: list[str] = []
    after = chosen_again(ranking("eager", "compiled", measured=False), {"eager": 1.0}, told)
    assert after.best.plan.execution == "eager"
    assert sum(line.startswith("trying") for line in told) == 1


def test_without_a_plan_that_runs_nothing_changes() -> None:
    """What failed is told."""
    told: list[str] = []
    before = ranking("step-graph", "compiled", "eager")
    assert chosen_again(before, {}, told) is before
    assert told.count("  failed: no way") == 2


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def test_a_run_on_batches_of_many_shapes_has_the_losses_of_the_plain_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan for one shape is in force until the shapes have been seen, then one for any; nothing is refused."""
    tried: list[tuple[str, int]] = []

    def trial(make: Any, plan: Plan, script: Any, examples: Any, *others: Any) -> Timeline:
        tried.append((plan.execution, len(examples)))
        is_one_shape = len(examples) == 1
        step_s = {"compiled": 1e-6, "eager": 1e-3}.get(plan.execution, 1.0)
        if not is_one_shape and plan.execution != "eager":
            step_s = 1.0
        measured = make_candidate(plan.execution, step_s, is_measured=True).measured
        assert measured is not None
        return msgspec.structs.replace(measured, steps_ns=(round(step_s * 1e9),) * 5)

    monkeypatch.setattr(choice, "run_trial", trial)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    batches = [torch.randn(3 + index * 7 % 10, 6) for index in range(WATCHED_STEPS + 8)]
    plain, mine = Counted(), Counted()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, mine)]
    losses = []
    for batch in batches:
        optimizers[0].zero_grad()
        loss = loss_fn(plain, batch)
        loss.backward()
        optimizers[0].step()
        losses.append(loss.item())
    machine = make_machine(settings=[rl.machine.Setting(device="cpu", workers=1, threads=1)])
    with rl.TrainStep(
        mine, loss_fn, optimizers[1], machine=machine, device="cpu", steps=10**9
    ) as step:
        executions = []
        for batch, loss in zip(batches, losses, strict=True):
            assert step(batch).item() == pytest.approx(loss, rel=1e-5)
            executions.append(step.plan.execution)
        assert executions[: WATCHED_STEPS - 1] == ["compiled"] * (WATCHED_STEPS - 1)
        assert set(executions[WATCHED_STEPS - 1 :]) == {"eager"}
        assert REASON in step.notes
    assert ("eager", MANY_SHAPES) in tried
