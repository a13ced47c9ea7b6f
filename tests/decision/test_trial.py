"""How many steps a trial makes: as their length allows, and none that would not end in the seconds given."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.decision import trial
from ridgeline.errors import OutOfTimeError
from ridgeline.host.speed import HostSpeed
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.planner.exchanges.periods import EXCHANGED_SHARE, MOST_KEPT, has_exchange
from ridgeline.planner.trials.trial_steps import first_steps, least_steps, trial_steps
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import WINDOW, Recorder
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.timeline import Timeline
from ridgeline.workers.world import World


class Step:
    """Takes as long as it is told, by the clock of the test; its timeline counts what was measured."""

    def __init__(self, plan: Plan, seconds: Callable[[int], float]) -> None:
        self.plan, self.now_s, self.num_steps = plan, 0.0, 0
        self.recorder = Recorder(HostClock())
        self._seconds, self._is_warm = seconds, False
        self.notes: list[str] = []
        self.calls: list[tuple[str, int]] = []

    def __call__(self, batch: Any) -> Tensor:
        self.recorder.begin_step(0)
        self.now_s += self._seconds(self.num_steps)
        self.num_steps += 1
        self.recorder.end_step(is_warmup=not self._is_warm)
        return torch.zeros(())

    def begin_warm_up(self) -> None:
        self._is_warm = False

    def end_warm_up(self) -> None:
        self._is_warm = True

    def hold_exchanges(self) -> None:
        self.calls.append(("hold", self.num_steps))

    def release_exchange(self) -> float:
        self.calls.append(("release", self.num_steps))
        return 0.25

    def timeline(self) -> Timeline:
        return self.recorder.timeline("step", 1)

    def close(self) -> None:
        """Nothing is held."""


def attempt(
    step: Any, given_s: float = math.inf, hopeless_s: float = math.inf, kind: str = "cpu"
) -> Timeline:
    """A trial of the step, by its clock."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    clock = SimpleNamespace(perf_counter=lambda: step.now_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "time", clock)
        return trial.run_trial(
            lambda plan: step,
            step.plan,
            trial.Script(model, lambda model, batch: model(batch).sum(), optimizer),
            [torch.ones(2)],
            World(0, 1, 0, torch.device(kind)),
            lambda: given_s - step.now_s,
            hopeless_s=hopeless_s,
        )


@pytest.mark.parametrize(
    ("step_s", "num_warm", "num_measured"),
    [
        (2**-10, 7, 100),
        (2**-4, 7, 16),
        (0.5, 2, 8),
        (1.0, 2, 8),
        (2.0, 2, 5),
        (4.0, 2, 3),
        (60.0, 2, 3),
    ],
)
def test_long_steps_are_few(step_s: float, num_warm: int, num_measured: int) -> None:
    """Eight where they take ten seconds at most, three at least; short ones for a second."""
    step = Step(Plan(), lambda number: step_s)
    assert len(attempt(step).steps_ns) == num_measured
    assert step.num_steps == num_warm + num_measured == trial_steps(Plan(), step_s)


@pytest.mark.parametrize(
    ("kind", "given_s", "num_slow", "num_more"),
    [
        ("cuda", math.inf, 3, 3),
        ("cuda", math.inf, 0, 0),
        ("cuda", math.inf, 1000, 7),
        ("cuda", 1e6, 3, 0),
        ("cpu", math.inf, 3, 3),
    ],
)
def test_what_a_slow_host_issues_is_measured_later(
    kind: str, given_s: float, num_slow: int, num_more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is as fast as usual, or after a few seconds; what was given seconds does not wait."""
    step = Step(Plan(), lambda number: 0.5)
    answers = iter([True] * num_slow)
    speed = HostSpeed(lambda: step.now_s)
    monkeypatch.setattr(speed, "is_slow", lambda: next(answers, False))
    monkeypatch.setattr(trial, "HOST_SPEED", speed)
    assert len(attempt(step, given_s, kind=kind).steps_ns) == 8
    assert step.num_steps == 2 + num_more + 8


@pytest.mark.parametrize(
    ("step_s", "num_alone", "num_kept"),
    [(0.25, 8, 8), (2**-7, 0, 2), (0.5, 8, 8), (2.0, 0, 5)],
)
def test_workers_that_train_alone_are_tried_until_an_exchange_ended(
    step_s: float, num_alone: int, num_kept: int
) -> None:
    """Behind steps without one, or in whole periods where that is as short; else none is measured."""
    sync = Sync(every=50, options={"fragments": 4, "delay": 10})
    step = Step(Plan(workers=2, sync=sync), lambda number: step_s)
    found = attempt(step)
    assert step.num_steps == trial_steps(step.plan, step_s)
    num_warm = step.num_steps - step.recorder.num_steps
    assert step.calls == [("hold", 0), ("release", num_warm + num_alone)]
    assert step.recorder.num_steps == (num_alone + 11 if num_alone else 110 if step_s < 1 else 5)
    assert len(found.steps_ns) == num_kept
    assert (EXCHANGED_SHARE in found.counters) == bool(num_alone)
    assert has_exchange(found, sync) == (step_s < 1)


def test_an_exchange_that_does_not_end_in_time_is_not_measured() -> None:
    """What was measured until then stays as it is: its exchange is priced by the prediction."""
    sync = Sync(every=50)
    step = Step(Plan(workers=2, sync=sync), lambda number: 0.5 if number < 9 else 4.0)
    found = attempt(step, 5.0)
    assert not has_exchange(found, sync)
    assert 0 < len(found.steps_ns) <= 8


@pytest.mark.parametrize(
    ("step_s", "hopeless_s", "num_warm", "num_measured"),
    [(4.0, 3.9, 1, 1), (4.0, 4.1, 2, 3), (0.5, 0.4, 2, 8)],
)
def test_what_is_too_slow_to_be_chosen_is_measured_once(
    step_s: float, hopeless_s: float, num_warm: int, num_measured: int
) -> None:
    """Where its steps take seconds; short ones cost nothing."""
    for plan in (Plan(), Plan(workers=2, sync=Sync(every=50))):
        step = Step(plan, lambda number: step_s)
        found = attempt(step, hopeless_s=hopeless_s)
        assert step.recorder.num_steps in (num_measured, num_measured + 1)
        assert step.num_steps - step.recorder.num_steps == num_warm
        assert len(found.steps_ns) == num_measured


@pytest.mark.parametrize(("given_s", "num_warm"), [(math.inf, 4), (100.0, 1)])
def test_steps_that_become_faster_still_warm_up(given_s: float, num_warm: int) -> None:
    """Until one takes as long as the one before; with little time they count."""
    seconds = [4.0, 3.0, 2.0, 2.0]
    step = Step(Plan(), lambda number: seconds[min(number, 3)])
    measured = attempt(step, given_s)
    assert step.num_steps == num_warm + len(measured.steps_ns)


@pytest.mark.parametrize(
    ("execution", "num_first"), [("eager", 1), ("compiled", 2), ("step-graph", 3), ("graph", 5)]
)
def test_what_prepares_a_plan_tells_nothing_of_its_steps(
    execution: Execution, num_first: int
) -> None:
    """Compiling may take minutes; the length of a step is known from the first one that compiles nothing."""
    plan = Plan(execution=execution)
    step = Step(plan, lambda number: 0.5 if number >= num_first - 1 else 100.0)
    assert first_steps(plan) == num_first
    assert len(attempt(step).steps_ns) == 8


def test_a_trial_keeps_all_the_steps_of_its_periods() -> None:
    """The recorder has room for as many as the planner counts on."""
    assert MOST_KEPT == WINDOW


@given(st.floats(1e-3, 10.0), st.floats(0.1, 100.0), st.floats(1.0, 3.0))
def test_no_step_is_begun_that_would_not_end_in_time(
    step_s: float, given_s: float, cold: float
) -> None:
    """Whatever was measured until then counts; without a measured step the plan was not tried."""
    assume(cold * step_s + 7 * step_s < given_s)  # what warms up is not looked after here
    step = Step(Plan(), lambda number: step_s * (1.0 if number else cold))
    measured = attempt(step, given_s)
    assert step.now_s <= given_s * (1 + 1e-9)
    unlimited = Step(Plan(), lambda number: step_s * (1.0 if number else cold))
    assert 1 <= len(measured.steps_ns) <= len(attempt(unlimited).steps_ns)


@pytest.mark.parametrize(("given_s", "num_warm"), [(1.0, 3), (0.75, 2), (4.0, 4)])
def test_warming_up_leaves_the_time_of_a_measured_step(given_s: float, num_warm: int) -> None:
    """A trial that only warms up tells nothing, and no signal stops several workers."""
    step = Step(Plan(), lambda number: 0.25)
    assert len(attempt(step, given_s).steps_ns) == min(8, int(given_s / 0.25) - num_warm)
    assert step.now_s <= given_s


def test_first_steps_end_where_time_is_up() -> None:
    """Of several workers, too: all ask for the time between two steps."""
    step = Step(Plan(execution="step-graph"), lambda number: 4.0)
    assert first_steps(step.plan) == 3
    with pytest.raises(OutOfTimeError, match=r"got 0 s left where one takes 4\.00 s"):
        attempt(step, 6.0)
    assert step.num_steps == 2


def test_a_plan_of_which_no_step_was_measured_was_not_tried() -> None:
    """The error says what a step takes, and what was left."""
    step = Step(Plan(), lambda number: 4.0)
    with pytest.raises(OutOfTimeError) as caught:
        attempt(step, 7.0)
    assert str(caught.value) == (
        "wanted a measured step of 1 worker, eager, got 3.00 s left where one takes 4.00 s; allow more seconds"
    )
    assert step.num_steps == 1


@pytest.mark.parametrize("num_whole", [1, 2])
def test_a_trial_that_is_stopped_keeps_what_it_measured(num_whole: int) -> None:
    """One measured step is enough."""

    def seconds(number: int) -> float:
        if number == num_whole:
            raise OutOfTimeError("time is up")
        return 2.0

    step = Step(Plan(), seconds)
    if num_whole == 1:
        with pytest.raises(OutOfTimeError, match="time is up"):
            attempt(step, 1e3)
    else:
        assert len(attempt(step, 1e3).steps_ns) == num_whole - 1


def test_a_trial_is_stopped_in_whatever_it_does() -> None:
    """The step of a worker alone does not come back: model and random state are put back all the same."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        while True:
            pass

    with pytest.raises(OutOfTimeError, match=r"^wanted a trial of 1 worker, eager within 450 ms, "):
        trial.run_trial(
            lambda plan: PlannedStep(model, loss_fn, optimizer, plan, device="cpu"),
            Plan(),
            trial.Script(model, loss_fn, optimizer),
            [torch.ones(2)],
            World(0, 1, 0, torch.device("cpu")),
            lambda: 0.5,
        )
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@given(st.floats(1e-4, 20.0))
def test_a_trial_is_expected_to_take_what_it_takes(step_s: float) -> None:
    """So that what is left for others is known; what is begun at least fits into it."""
    step = Step(Plan(), lambda number: step_s)
    attempt(step)
    assert abs(step.num_steps - trial_steps(Plan(), step_s)) <= 1
    assert least_steps(Plan()) <= trial_steps(Plan(), step_s)


def test_the_timeline_begins_where_the_warm_up_is_over() -> None:
    """However many steps that took; the first of it has its frames, on a GPU, too."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(
        model, lambda model, batch: model(batch).sum(), optimizer, Plan(), device="cpu"
    ) as step:
        step.begin_warm_up()
        step.recorder._sampling = 8
        for _ in range(5):
            step(torch.ones(2))
        step.end_warm_up()
        assert step.recorder.num_steps == 0
        for _ in range(2):
            step(torch.ones(2))
        measured = step.timeline()
        assert len(measured.steps_ns) == 2
        assert "forward" in {span.name for span in measured.spans}


@pytest.mark.parametrize(("num_whole", "num_kept"), [(0, 0), (9, 0), (10, 3), (40, 33)])
def test_one_batch_again_and_again_may_end_a_trial(num_whole: int, num_kept: int) -> None:
    """A model that comes to values which its own checks refuse is measured as far as it came, 3 steps or more."""

    def seconds(number: int) -> float:
        if number == num_whole:
            raise ValueError("Expected parameter loc")
        return 2**-10

    step = Step(Plan(), seconds)
    if num_kept:
        assert len(attempt(step).steps_ns) == num_kept
    else:
        with pytest.raises(ValueError, match="Expected parameter loc"):
            attempt(step)


def test_every_example_is_met_twice_before_steps_count() -> None:
    """A compiler makes a program for the second shape that serves the others."""
    seen: list[float] = []

    class Looking(Step):
        def __call__(self, batch: Any) -> Tensor:
            seen.append(float(batch))
            return super().__call__(batch)

    step = Looking(Plan(execution="compiled"), lambda _: 0.5)
    model = nn.Linear(2, 2)
    examples = [torch.tensor(float(number)) for number in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: step.now_s))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        measured = trial.run_trial(
            lambda plan: step,
            step.plan,
            trial.Script(model, lambda model, batch: model(batch).sum(), optimizer),
            examples,
            World(0, 1, 0, torch.device("cpu")),
        )
    num_warm = len(seen) - len(measured.steps_ns)
    assert seen == [float(index % 4) for index in range(len(seen))]
    assert num_warm == first_steps(step.plan) + 2 * (len(examples) - 1)
