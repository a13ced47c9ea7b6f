"""A saved profile that trials contradict is made anew; a young one, or one without trials, is believed."""

import datetime
import weakref
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from planned_loads import make_loads

from ridgeline.errors import CaptureError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.trials.staleness import YOUNG, choose_by_profile, remembered, why_stale
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from strategies import make_machine

NOW = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
LOADS = make_loads()


def measured_at(age: datetime.timedelta, rate: float = 1e9) -> Machine:
    """A profile of a machine of round numbers, made so long ago."""
    return msgspec.structs.replace(
        make_machine(rate=rate), measured_at=(NOW - age).isoformat(timespec="seconds")
    )


def trial_of(machine: Machine, factor: float = 1.0) -> Callable[[Plan], Timeline]:
    """Runs plans on a machine that is `factor` times as slow as its profile."""

    def trial(plan: Plan) -> Timeline:
        predicted = simulate(machine, LOADS[plan.workers], plan, details=False)
        return msgspec.structs.replace(
            predicted, origin="measured", steps_ns=(round(predicted.step_ns * factor),)
        )

    return trial


def ranked(machine: Machine, factor: float) -> Ranking:
    return choose(machine, LOADS, trial=trial_of(machine, factor), fixed={"workers": 1})


@given(st.floats(0.5, 2.0), st.integers(0, 10_000))
def test_stale_is_what_is_old_and_contradicted(factor: float, minutes: int) -> None:
    """Both together, and neither alone."""
    machine = measured_at(datetime.timedelta(minutes=minutes))
    error = abs(1.0 / factor - 1.0)
    assume(abs(error - 0.15) > 1e-6)  # times are whole nanoseconds
    is_old = minutes > YOUNG.total_seconds() / 60
    why = why_stale(machine, ranked(machine, factor), NOW)
    assert (why is not None) is (error > 0.15 and is_old)


def test_the_reason_names_both_times() -> None:
    """When it was measured, what it predicts, what the trial took."""
    machine = measured_at(datetime.timedelta(hours=5))
    assert why_stale(machine, ranked(machine, 2.0), NOW) == (
        "the profile measured at 2026-03-01T07:00:00+00:00 predicts 241 ms a step where the trial took 481 ms"
    )


@pytest.mark.parametrize("when", ["2026-01-01", "yesterday", "2027-03-01T12:00:00+00:00"])
def test_a_date_written_by_hand_is_old(when: str) -> None:
    """Without a zone it is UTC; without sense, or in the future (the clock was set back), it is not young."""
    machine = msgspec.structs.replace(make_machine(), measured_at=when)
    assert why_stale(machine, ranked(machine, 2.0), NOW) is not None


def test_without_trials_nothing_contradicts() -> None:
    """A ranking by prediction alone says nothing of the machine."""
    machine = measured_at(datetime.timedelta(hours=5))
    assert why_stale(machine, choose(machine, LOADS), NOW) is None


def test_the_new_profile_counts_and_no_trial_runs_twice() -> None:
    """The machine became twice as fast: it is measured again, and predicted as it is."""
    slow, fast = measured_at(datetime.timedelta(days=1)), make_machine(rate=2e9)
    runs: list[str] = []
    asked: list[bool] = []
    said: list[str] = []
    run = trial_of(fast)

    def counted(plan: Plan) -> Timeline:
        runs.append(repr(plan))
        return run(plan)

    def profile(refresh: bool) -> Machine:
        asked.append(refresh)
        return fast if refresh else slow

    trial = remembered(counted)
    machine, ranking = choose_by_profile(
        profile,
        lambda machine: choose(machine, LOADS, trial=trial, fixed={"workers": 1}),
        say=said.append,
    )
    assert machine is fast
    assert asked == [False, True]
    assert len(runs) == len(set(runs))
    assert ranking.best.measured is not None
    assert ranking.best.timeline.step_ns == ranking.best.measured.step_ns
    assert [line.endswith(": measuring again") for line in said] == [True]


def test_a_profile_stands_where_no_time_is_left() -> None:
    """Rates that were measured once tell more than assumed ones, and nothing is ranked again."""
    slow = measured_at(datetime.timedelta(days=1))
    asked: list[Machine] = []

    def rank(machine: Machine) -> Ranking:
        asked.append(machine)
        return ranked(machine, 2.0)

    machine, ranking = choose_by_profile(lambda refresh: None if refresh else slow, rank)
    assert machine is slow
    assert asked == [slow]
    assert ranking.best.measured is not None


def test_worker_0_decides() -> None:
    """Where the others' word differs, theirs is not heard."""
    slow = measured_at(datetime.timedelta(days=1))
    machine, _ = choose_by_profile(
        lambda refresh: make_machine() if refresh else slow,
        lambda machine: ranked(machine, 2.0),
        agree=lambda why: "",
    )
    assert machine is slow


def test_a_doubtful_profile_is_measured_at_once_and_then_believed() -> None:
    """However old it is thought to be then, and whatever trials say; it is doubted no further."""
    old = measured_at(datetime.timedelta(days=1))
    asked: list[bool] = []
    said: list[str] = []
    machine, _ = choose_by_profile(
        lambda refresh: asked.append(refresh) or old,
        lambda machine: ranked(machine, 3.0),
        say=said.append,
        again="it was measured beside others",
        doubt=lambda *_: pytest.fail("doubted"),
    )
    assert (machine, asked) == (old, [True])
    assert said == ["it was measured beside others: measuring again"]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_young_profile_is_believed_and_doubted(factor: float) -> None:
    """Trials that contradict it are held against it for the next start."""
    young = msgspec.structs.replace(
        make_machine(), measured_at=datetime.datetime.now(datetime.UTC).isoformat()
    )
    told: list[Machine] = []
    machine, _ = choose_by_profile(
        lambda refresh: young,
        lambda machine: ranked(machine, factor),
        doubt=lambda machine, ranking: (
            told.append(machine) or msgspec.structs.replace(machine, suspect="yes")
        ),
    )
    assert told == [young]
    assert machine.suspect == "yes"


@pytest.mark.parametrize("kind", [CaptureError, TypeError])
def test_a_failure_is_remembered_too(kind: type[Exception]) -> None:
    """What cannot be captured or compiled is not tried again to learn that."""
    runs: list[Plan] = []

    def failing(plan: Plan) -> Timeline:
        runs.append(plan)
        raise kind("wanted a step that can be captured")

    trial = remembered(failing)
    for _ in range(2):
        with pytest.raises(kind, match="wanted a step that can be captured"):
            trial(Plan())
    assert len(runs) == 1


def test_a_failed_trial_holds_no_memory() -> None:
    """What its frames held is gone before the next trial, also behind an error that wraps another."""
    held: list[weakref.ref[torch.Tensor]] = []

    def failing(plan: Plan) -> Timeline:
        large = torch.ones(8)
        held.append(weakref.ref(large))
        try:
            raise RuntimeError("out of memory")
        except RuntimeError as error:
            raise CaptureError("wanted memory") from error

    with pytest.raises(CaptureError, match="wanted memory"):
        remembered(failing)(Plan())
    assert [reference() for reference in held] == [None]
