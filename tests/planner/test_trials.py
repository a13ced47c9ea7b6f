"""`choose` with trials: which plans run, what they decide, and what becomes of failures."""

import msgspec
import pytest
from planned_loads import make_loads

from planned_candidates import make_candidate
from ridgeline.errors import CaptureError, ObstacleError, OutOfTimeError, PlanError
from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.planner.labels import label
from ridgeline.planner.trials import trial_loop
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import DEFAULT_BUCKET_BYTES
from ridgeline.timeline import Timeline
from strategies import make_machine, make_workload


class Trial:
    """Pretends to run plans: the prediction times a factor that the test gives."""

    def __init__(self, machine, loads, factor=lambda plan: 1.0, spread: float = 0.0) -> None:
        self.machine, self.loads, self.factor, self.spread = machine, loads, factor, spread
        self.plans: list[Plan] = []

    def __call__(self, plan: Plan) -> Timeline:
        self.plans.append(plan)
        predicted = simulate(self.machine, self.loads[plan.workers], plan, details=False)
        step = predicted.step_ns * self.factor(plan)
        steps = tuple(round(step * (1 + self.spread * k)) for k in (-1, -0.5, 0, 0.5, 1))
        return msgspec.structs.replace(predicted, origin="measured", steps_ns=steps)


def test_trials_decide_over_predictions() -> None:
    """Tried plans come first, by what was measured."""
    machine, loads = make_machine(latency_s=1e-5), make_loads()
    trial = Trial(machine, loads, lambda plan: 3.0 if plan.workers == 2 else 1.0)
    ranking = choose(machine, loads, trial=trial)
    assert ranking.best.plan.workers == 1
    assert ranking.best.measured is not None
    assert ranking.error == pytest.approx(2 / 3)
    tried = [c.measured is not None for c in ranking.candidates]
    assert tried == sorted(tried, reverse=True)


def test_trials_begin_with_every_kind_of_plan() -> None:
    """With two tries both numbers of workers run where both may win; never a plan twice."""
    machine, loads = make_machine(latency_s=1e-5), make_loads(gradient_bytes=3 << 20)
    trial = Trial(machine, loads)
    choose(machine, loads, trial=trial, tries=2)
    assert sorted(plan.workers for plan in trial.plans) == [1, 2]
    trial = Trial(machine, loads)
    ranking = choose(machine, loads, trial=trial, tries=99)
    assert len(trial.plans) == len({repr(plan) for plan in trial.plans}) <= len(ranking.candidates)


def test_near_duplicates_are_not_tried() -> None:
    """Plans alike but for buckets that are predicted to make no difference run once."""
    machine, loads = (
        make_machine(latency_s=1e-6, bandwidth=1e12),
        make_loads(gradient_bytes=3 << 20),
    )
    trial = Trial(machine, loads)
    choose(machine, loads, trial=trial, tries=9, fixed={"workers": 2})
    assert [plan.sync.bucket_bytes for plan in trial.plans] == [DEFAULT_BUCKET_BYTES]


def test_short_runs_are_not_spent_on_trials() -> None:
    """Trials take at most a quarter of a run whose length is known."""
    machine, loads = make_machine(), make_loads()
    for steps, most in ((10, 0), (60, 1), (120, 2)):
        trial = Trial(machine, loads)
        choose(machine, loads, trial=trial, steps=steps)
        assert len(trial.plans) == most


def test_noise_does_not_decide() -> None:
    """A measured win within the spread of the measurement keeps the simpler plan."""
    machine, loads = make_machine(latency_s=1e-6, bandwidth=1e12), make_loads(gradient_bytes=64)
    slow = lambda plan: 1.9 if plan.workers == 2 else 1.0  # noqa: E731 - 2 workers win by 5 %
    noisy = choose(machine, loads, trial=Trial(machine, loads, slow, spread=0.2))
    assert noisy.best.plan.workers == 1
    assert "within the uncertainty of 10.0 %" in noisy.best.why
    calm = choose(machine, loads, trial=Trial(machine, loads, slow, spread=0.001))
    assert calm.best.plan.workers == 2


def test_a_value_is_judged_by_what_was_measured_with_it() -> None:
    """Not by a twin with other buckets that was not tried."""
    machine, loads = make_machine(latency_s=1e-5), make_loads(gradient_bytes=3 << 20)
    trial = Trial(machine, loads, lambda plan: 3.0 if plan.workers == 2 else 1.0)
    ranking = choose(machine, loads, trial=trial, tries=2)
    two = [c for c in ranking.candidates if c.plan.workers == 2]
    assert [c.measured is not None for c in two].count(True) == 1 < len(two)
    choice = ranking.choice("workers")
    assert [(a.value, a.is_measured) for a in choice.alternatives] == [("2", True)]
    assert choice.reason.startswith("measured ")


def test_a_failed_trial_is_kept_with_its_reason() -> None:
    """What failed stands last and says why; the rest goes on."""
    machine, loads = make_machine(latency_s=1e-5), make_loads()

    def trial(plan: Plan) -> Timeline:
        if plan.workers == 2:
            raise PlanError("no second process")
        return Trial(machine, loads)(plan)

    ranking = choose(machine, loads, trial=trial)
    assert ranking.best.plan.workers == 1
    failed = [c for c in ranking.candidates if c.failure]
    assert failed
    assert ranking.candidates[-1] in failed
    assert failed[0].why == "failed when tried: no second process"


@pytest.mark.parametrize(("kind", "is_tried"), [(ObstacleError, False), (CaptureError, True)])
def test_what_no_graph_can_hold_is_not_captured_in_other_ways(
    kind: type[CaptureError], is_tried: bool
) -> None:
    """An obstacle in the step itself fails every plan that is replayed; other failures of one fail that one."""
    workload = make_workload(device="cuda")
    machine = make_machine(device="cuda", dispatch_s=1e-3)
    working = Trial(machine, {1: workload})

    def trial(plan: Plan) -> Timeline:
        if MODES[plan.execution].is_replayed_on("cuda"):
            working.plans.append(plan)
            raise kind("wanted no obstacle, got one")
        return working(plan)

    ranking = choose(machine, workload, fixed={"workers": 1}, trial=trial, tries=99)
    replayed = [plan for plan in working.plans if MODES[plan.execution].is_replayed_on("cuda")]
    assert (len(replayed) > 1) is is_tried
    failed = [c for c in ranking.candidates if MODES[c.plan.execution].is_replayed_on("cuda")]
    assert len(failed) > 1
    reason = f"not tried, since {label(replayed[0])} failed: wanted no obstacle, got one"
    assert sum(c.failure == reason for c in failed) == (0 if is_tried else len(failed) - 1)
    assert ranking.best.measured is not None


def test_a_trial_without_steps_failed() -> None:
    """A timeline of no steps measured nothing; the plans that were not tried so go on."""
    machine, loads = make_machine(latency_s=1e-5), make_loads()

    def trial(plan: Plan) -> Timeline:
        measured = Trial(machine, loads)(plan)
        return msgspec.structs.replace(measured, steps_ns=()) if plan.workers == 2 else measured

    ranking = choose(machine, loads, trial=trial)
    assert ranking.best.plan.workers == 1
    assert ranking.candidates[-1].failure == (
        "wanted a measured timeline with at least one step, got none in 'toy'; record at least one step after "
        "the warm-up"
    )


def test_all_trials_failed() -> None:
    """When nothing is left the first failure is told."""

    def trial(plan: Plan) -> Timeline:
        raise PlanError("out of order")

    with pytest.raises(PlanError) as error:
        choose(make_machine(), make_workload(), trial=trial)
    assert str(error.value) == (
        "wanted a plan that runs, got 1 that failed; the first, 1 worker x 2 threads, eager: out of order"
    )


def test_other_errors_of_a_trial_are_not_swallowed() -> None:
    """Those of plans that compile nothing are the user's: only what Ridgeline refuses is a reason to go on."""

    def trial(plan: Plan) -> Timeline:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        choose(make_machine(), make_workload(), trial=trial)


def test_a_fused_optimizer_that_fails_is_tried_as_the_user_made_it() -> None:
    """That form is not the user's wish: what runs without it is not refused, and other errors come again."""
    workload = msgspec.structs.replace(
        make_workload(device="cuda"), fused_optimizer_bytes=1_000_000
    )
    machine = make_machine(device="cuda")
    plans = []

    def trial(plan: Plan) -> Timeline:
        plans.append(plan)
        if plan.optimizer == "fused" or plan.execution != "eager":
            raise RuntimeError("`_fused_sgd` does not support sparse gradients")
        return Trial(machine, {1: workload})(plan)

    ranking = choose(machine, workload, trial=trial)
    assert "fused" in {plan.optimizer for plan in plans}
    assert (ranking.best.plan.execution, ranking.best.plan.optimizer) == ("eager", "as-is")
    assert ranking.best.measured is not None


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_layout_that_the_users_code_does_not_bear_fails_that_plan(is_alone: bool) -> None:
    """A view of what a convolution gave is an error in the other layout; as it was written, it would be the user's."""
    written = make_candidate("eager", 1.0)
    plan = msgspec.structs.replace(written.plan, memory_format="channels_last")
    candidate = msgspec.structs.replace(written, plan=plan)
    tried = []

    def trial(plan: Plan) -> Timeline:
        tried.append(plan.memory_format)
        if plan.memory_format == "channels_last":
            raise RuntimeError("view size is not compatible")
        return make_candidate("eager", 1.0, is_measured=True).measured

    others = [candidate] if is_alone else [candidate, written]
    after, has_obstacles = trial_loop.attempted(candidate, others, trial, {})
    assert not has_obstacles
    if is_alone:
        assert (after.plan, after.failure, tried) == (written.plan, "", ["channels_last", "as-is"])
    else:
        assert (after.plan, after.failure) == (plan, "RuntimeError: view size is not compatible")
    with pytest.raises(ZeroDivisionError):
        trial_loop.attempted(written, [written], lambda _: 1 // 0, {})
    with pytest.raises(RuntimeError, match="view size"):  # the user's own wish
        trial_loop.attempted(candidate, [candidate], trial, {"memory_format": "channels_last"})


def test_the_table_fits_eighty_columns() -> None:
    """The ranking prints as a table: one row a plan, best first, ASCII, at most 80 columns."""
    machine, loads = make_machine(latency_s=1e-5), make_loads(gradient_bytes=3 << 20)
    ranking = choose(machine, loads, trial=Trial(machine, loads))
    lines = repr(ranking).splitlines()
    assert max(map(len, lines)) <= 80
    assert repr(ranking).isascii()
    assert lines[0].split() == ["plan", "predicted", "measured", "ratio"]
    assert lines[1].startswith("1  2 workers x 1 thread, eager")
    assert lines[1].endswith("1.00 x")


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_trial_that_runs_out_of_time_is_the_last(num_before: int) -> None:
    """It was not tried, which a note says; the choice falls among what was, or on a plain plan."""
    machine, loads = make_machine(), make_loads()
    trial = Trial(machine, loads)

    def stopped(plan: Plan) -> Timeline:
        if len(trial.plans) == num_before:
            trial.plans.append(plan)
            raise OutOfTimeError("time is up")
        return trial(plan)

    ranking = choose(machine, loads, trial=stopped, seconds=1e6)
    assert len(trial.plans) == num_before + 1
    assert ranking.notes[0].endswith(" was not tried to the end: time is up")
    assert [c.measured is not None for c in ranking.candidates].count(True) == num_before
    assert not any(c.failure for c in ranking.candidates)
    assert ranking.best.plan.execution == "eager"
