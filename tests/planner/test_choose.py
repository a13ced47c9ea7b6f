"""`choose`: what is enumerated, how it is ranked, which trials run, and what is claimed."""

import msgspec
import pytest

from ridgeline.errors import MachineError, PlanError
from ridgeline.machine import Setting
from ridgeline.plan import DEFAULT_BUCKET_BYTES, Plan
from ridgeline.planner import Candidate, Ranking, choose
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from strategies import make_machine, make_workload

MS = 1_000_000


def _loads(scale: int = 10, gradient_bytes: int = 1 << 19) -> dict:
    """One global batch of 64 for one worker or two."""
    return {
        workers: make_workload(
            forward=[scale * MS // workers] * 8,
            backward=[2 * scale * MS // workers] * 8,
            gradient_bytes=[gradient_bytes] * 8,
            samples=64 // workers,
        )
        for workers in (1, 2)
    }


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


def test_two_workers_win_when_communication_is_cheap() -> None:
    """The number of workers is chosen from the workloads of one global batch."""
    ranking = choose(make_machine(latency_s=1e-5), _loads())
    assert ranking.best.plan.workers == 2
    assert ranking.best.plan.threads == 1
    assert ranking.candidates[-1].plan.workers == 1
    assert ranking.candidates[-1].plan.threads == 2


def test_one_worker_wins_when_communication_is_dear() -> None:
    """A second worker that costs more than it brings is not taken."""
    ranking = choose(make_machine(latency_s=1.0), _loads())
    assert ranking.best.plan.workers == 1
    assert ranking.choice("workers").reason.startswith("predicted ")


def test_shared_cores_are_not_free() -> None:
    """Rates are those of the setting: two workers that halve each other's speed gain nothing."""
    machine = make_machine(latency_s=1e-5, worker_rates={1: 1e9, 2: 0.5e9})
    ranking = choose(machine, _loads())
    assert ranking.best.plan.workers == 1


def test_candidates_are_ranked_by_time_per_sample() -> None:
    """The order of what was predicted is that of the predicted times, the chosen plan aside."""
    ranking = choose(make_machine(), _loads())
    times = [c.sample_s for c in ranking.candidates[1:]]
    assert times == sorted(times)
    assert all(c.samples == 64 for c in ranking.candidates)


def test_a_gain_within_the_error_is_not_claimed() -> None:
    """Two workers that win by less than the uncertainty leave the simpler plan in place, and say so."""
    machine = make_machine(latency_s=1e-6, bandwidth=1e12, worker_rates={1: 1e9, 2: 0.52e9})
    ranking = choose(machine, _loads(gradient_bytes=1024))
    assert ranking.best.plan.workers == 1
    assert "within the uncertainty of 5.0 %, so the simpler plan is kept" in ranking.best.why
    assert ranking.choice("workers").reason.endswith("the simpler plan is kept")
    assert ranking.candidates[1].sample_s < ranking.best.sample_s


def test_every_knob_has_a_choice() -> None:
    """The winning plan records value, origin, reason and alternatives of every knob."""
    ranking = choose(make_machine(latency_s=1e-5), _loads(), fixed={"depth": 4})
    choices = {choice.knob: choice for choice in ranking.best.plan.choices}
    assert tuple(choices) == (
        "workers", "threads", "execution", "precision", "accumulate", "bucket_bytes", "depth",
    )  # fmt: skip
    origins = {knob: choice.origin for knob, choice in choices.items()}
    assert origins["workers"] == "search"
    assert origins["depth"] == "user"
    assert origins["execution"] == "default"
    assert all(choice.reason for choice in choices.values())
    assert [a.value for a in choices["workers"].alternatives] == ["1"]
    assert choices["workers"].alternatives[0].step_s > ranking.best.step_s


def test_bucket_sizes_are_searched() -> None:
    """Default cuts, one bucket and the searched cuts are compared."""
    machine = make_machine(latency_s=1e-4, bandwidth=2e8)
    ranking = choose(
        machine, make_workload(backward=[20 * MS] * 8, gradient_bytes=[3 << 20] * 8), world_size=2
    )
    limits = {c.plan.sync.bucket_bytes for c in ranking.candidates}
    assert DEFAULT_BUCKET_BYTES in limits
    assert (24 << 20,) in limits
    assert len(limits) == 3
    assert len(ranking.choice("bucket_bytes").alternatives) == 2


def test_one_workload_runs_on_the_world() -> None:
    """A single workload is what each of `world_size` workers does."""
    ranking = choose(make_machine(), make_workload(), world_size=2)
    assert {c.plan.workers for c in ranking.candidates} == {2}
    assert ranking.best.samples == 16
    assert choose(make_machine(), make_workload()).best.plan.workers == 1


def test_world_size_limits_a_mapping() -> None:
    """Workloads for more workers than there are do not count."""
    assert {c.plan.workers for c in choose(make_machine(), _loads(), world_size=1).candidates} == {
        1
    }


def test_workers_that_do_not_fit_the_cores_are_left_out_unless_fixed() -> None:
    """Two workers on one core are tried only for a user who insists."""
    machine = make_machine(cores=1)
    assert {c.plan.workers for c in choose(machine, _loads()).candidates} == {1}
    assert choose(machine, _loads(), fixed={"workers": 2}).best.plan.threads == 1


def test_fixed_knobs_are_honoured() -> None:
    """What the user sets is not searched, and is recorded as theirs."""
    fixed = {
        "workers": 2,
        "threads": 1,
        "execution": "eager",
        "bucket_bytes": 1 << 20,
        "accumulate": 2,
    }
    ranking = choose(make_machine(), _loads(), fixed=fixed)
    assert len(ranking.candidates) == 1
    plan = ranking.best.plan
    assert (plan.workers, plan.threads, plan.accumulate) == (2, 1, 2)
    assert plan.sync.bucket_bytes == (1 << 20,)
    origins = {c.knob: c.origin for c in plan.choices}
    assert {knob for knob, origin in origins.items() if origin == "user"} == set(fixed)


def test_gpus_get_graphs() -> None:
    """On a GPU whole-step graphs are compared with eager and win when launches bind."""
    machine = make_machine(device="cuda", dispatch_s=5e-3, replay_s=1e-5)
    ranking = choose(machine, make_workload(device="cuda"))
    assert [c.plan.execution for c in ranking.candidates] == ["graph", "eager"]
    assert ranking.best.plan.threads == 0
    busy = make_machine(device="cuda", dispatch_s=1e-9, replay_s=1e-9)
    assert choose(busy, make_workload(device="cuda")).best.plan.execution == "eager"


def test_inexact_plans_need_permission() -> None:
    """Lower precision is compared only when it is allowed."""
    machine = make_machine(device="cuda")
    workload = make_workload(device="cuda")
    assert all(c.plan.exact for c in choose(machine, workload).candidates)
    allowed = choose(machine, workload, allow=("bf16",))
    assert {c.plan.precision for c in allowed.candidates} == {"as-is", "bf16"}
    fixed = choose(machine, workload, fixed={"precision": "tf32"})
    assert {c.plan.precision for c in fixed.candidates} == {"tf32"}


def test_memory_decides_on_micro_batches() -> None:
    """When the batch does not fit, the fewest micro-batches that do are used."""
    machine = make_machine(memory_bytes=10_000_000)
    workload = make_workload(gradient_bytes=[1_000_000] * 2, activation_bytes=12_000_000)
    ranking = choose(machine, workload)
    assert ranking.best.plan.accumulate == 4
    assert ranking.choice("accumulate").reason == (
        "the whole batch does not fit in memory; 4 micro-batches do"
    )
    assert ranking.choice("accumulate").origin == "search"


def test_nothing_fits() -> None:
    """No plan is an error that says how much is missing."""
    with pytest.raises(PlanError) as error:
        choose(make_machine(memory_bytes=1000), make_workload())
    assert str(error.value) == (
        "wanted a plan that fits in memory, got none: 1 worker x 2 threads, eager, 8 micro-batches needs "
        "9568256 bytes of memory per worker, of which 900 are usable; reduce the batch size or use more "
        "devices"
    )


def test_trials_decide_over_predictions() -> None:
    """Tried plans come first, by what was measured."""
    machine, loads = make_machine(latency_s=1e-5), _loads()
    trial = Trial(machine, loads, lambda plan: 3.0 if plan.workers == 2 else 1.0)
    ranking = choose(machine, loads, trial=trial)
    assert ranking.best.plan.workers == 1
    assert ranking.best.measured is not None
    assert ranking.error == pytest.approx(2 / 3)
    tried = [c.measured is not None for c in ranking.candidates]
    assert tried == sorted(tried, reverse=True)


def test_trials_begin_with_every_kind_of_plan() -> None:
    """With two tries both numbers of workers run, the simplest of each; never a plan twice."""
    machine, loads = make_machine(latency_s=1e-5), _loads(gradient_bytes=3 << 20)
    trial = Trial(machine, loads)
    choose(machine, loads, trial=trial, tries=2)
    assert sorted(plan.workers for plan in trial.plans) == [1, 2]
    trial = Trial(machine, loads)
    ranking = choose(machine, loads, trial=trial, tries=99)
    assert len(trial.plans) == len({repr(plan) for plan in trial.plans}) <= len(ranking.candidates)


def test_near_duplicates_are_not_tried() -> None:
    """Plans alike but for buckets that are predicted to make no difference run once."""
    machine, loads = make_machine(latency_s=1e-6, bandwidth=1e12), _loads(gradient_bytes=3 << 20)
    trial = Trial(machine, loads)
    choose(machine, loads, trial=trial, tries=9, fixed={"workers": 2})
    assert [plan.sync.bucket_bytes for plan in trial.plans] == [DEFAULT_BUCKET_BYTES]


def test_short_runs_are_not_spent_on_trials() -> None:
    """Trials take at most a quarter of a run whose length is known."""
    machine, loads = make_machine(), _loads()
    for steps, most in ((10, 0), (60, 1), (120, 2)):
        trial = Trial(machine, loads)
        choose(machine, loads, trial=trial, steps=steps)
        assert len(trial.plans) == most


def test_noise_does_not_decide() -> None:
    """A measured win within the spread of the measurement keeps the simpler plan."""
    machine, loads = make_machine(latency_s=1e-6, bandwidth=1e12), _loads(gradient_bytes=64)
    slow = lambda plan: 1.9 if plan.workers == 2 else 1.0  # noqa: E731 - 2 workers win by 5 %
    noisy = choose(machine, loads, trial=Trial(machine, loads, slow, spread=0.2))
    assert noisy.best.plan.workers == 1
    assert "within the uncertainty of 20.0 %" in noisy.best.why
    calm = choose(machine, loads, trial=Trial(machine, loads, slow, spread=0.001))
    assert calm.best.plan.workers == 2


def test_a_failed_trial_is_kept_with_its_reason() -> None:
    """What failed stands last and says why; the rest goes on."""
    machine, loads = make_machine(latency_s=1e-5), _loads()

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
    """Only errors that Ridgeline raises on purpose are a reason to go on."""

    def trial(plan: Plan) -> Timeline:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        choose(make_machine(), make_workload(), trial=trial)


def test_plans_that_cannot_be_predicted_are_noted() -> None:
    """Two workers without measured collectives are left out, with the reason; one worker stays."""
    machine = msgspec.structs.replace(make_machine(), collectives=())
    ranking = choose(machine, _loads())
    assert {c.plan.workers for c in ranking.candidates} == {1}
    assert ranking.notes[0].startswith(
        "left out: 2 workers x 1 thread, eager, buckets 4.00 MiB: wanted"
    )
    with pytest.raises(MachineError):
        choose(machine, _loads(), fixed={"workers": 2})


def test_assumptions_are_in_the_notes() -> None:
    """What a ranking assumed is read beside it."""
    machine = make_machine(settings=[Setting(device="cpu", workers=2, threads=1)])
    notes = choose(machine, _loads()).notes
    assert notes == (
        "ceilings at 1 x 2 cpu threads were not measured: assumed as at 2 x 1 cpu threads",
    )


def test_the_best_candidate_shows_its_operators() -> None:
    """Only the chosen plan carries operator spans; the others would fill the file."""
    ranking = choose(make_machine(), _loads())
    assert any(span.detail for span in ranking.best.timeline.spans)
    assert not any(span.detail for c in ranking.candidates[1:] for span in c.timeline.spans)


def test_a_ranking_survives_its_file(tmp_path) -> None:
    """load(save(r)) is r, candidates and reasons included."""
    ranking = choose(make_machine(), _loads())
    assert Ranking.load(ranking.save(tmp_path / "ranking.json")) == ranking
    assert isinstance(ranking.best, Candidate)


def test_the_table_fits_eighty_columns() -> None:
    """The ranking prints as a table: one row a plan, best first, ASCII, at most 80 columns."""
    machine, loads = make_machine(latency_s=1e-5), _loads(gradient_bytes=3 << 20)
    ranking = choose(machine, loads, trial=Trial(machine, loads))
    lines = repr(ranking).splitlines()
    assert max(map(len, lines)) <= 80
    assert repr(ranking).isascii()
    assert lines[0].split() == ["plan", "predicted", "measured", "ratio"]
    assert lines[1].startswith("1  2 workers x 1 thread, eager")
    assert lines[1].endswith("1.00 x")


def test_explain() -> None:
    """A knob is explained with value, origin, reason and what others cost."""
    ranking = choose(make_machine(latency_s=1e-5), _loads())
    lines = ranking.explain("workers").splitlines()
    assert lines[0] == "workers = 2 (set by search)"
    assert lines[1].startswith("  predicted ")
    assert lines[2].startswith("  1: ")
    assert lines[2].endswith(" a step, predicted")
    with pytest.raises(PlanError) as error:
        ranking.explain("colour")
    assert str(error.value) == (
        "wanted a knob out of workers, threads, execution, precision, accumulate, bucket_bytes, depth, "
        "got 'colour'; name one of them"
    )


def _refused(message: str, **arguments: object) -> object:
    return pytest.param(arguments, message, id=message[:40])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        _refused(
            "wanted fixed knobs out of workers, threads, execution, precision, accumulate, bucket_bytes, "
            "depth, got 'worker'; correct its name",
            fixed={"worker": 2},
        ),
        _refused(
            "wanted workers as a whole number >= 1, got 0; correct it",
            fixed={"workers": 0},
        ),
        _refused(
            "wanted accumulate as a whole number >= 1, got 1.5; correct it",
            fixed={"accumulate": 1.5},
        ),
        _refused(
            "wanted bucket_bytes as bytes >= 1 or a tuple of them, got (0,); for example 4194304",
            fixed={"bucket_bytes": (0,)},
        ),
        _refused(
            "wanted bucket_bytes as bytes >= 1 or a tuple of them, got '4MB'; for example 4194304",
            fixed={"bucket_bytes": "4MB"},
        ),
        _refused(
            "wanted execution to be one of 'eager' on cpu, got 'graph'; this release runs no other there",
            fixed={"execution": "graph"},
        ),
        _refused(
            "wanted precision to be one of 'as-is', 'bf16' on cpu, got 'tf32'; this release runs no other "
            "there",
            fixed={"precision": "tf32"},
        ),
        _refused(
            "wanted allow to name changes of the maths out of tf32, bf16, got 'magic'; leave it out",
            allow=("magic",),
        ),
        _refused(
            "wanted a workload for workers=3, got workloads for [1, 2] workers; trace the step with the "
            "batch of a worker at that number",
            fixed={"workers": 3},
        ),
    ],
)
def test_impossible_requests(arguments: dict, message: str) -> None:
    """What cannot be honoured is refused with what could."""
    with pytest.raises(PlanError) as error:
        choose(make_machine(), _loads(), **arguments)
    assert str(error.value) == message


def test_contradicting_numbers_of_workers() -> None:
    """One workload cannot run on two numbers of workers."""
    with pytest.raises(PlanError) as error:
        choose(make_machine(), make_workload(), world_size=2, fixed={"workers": 1})
    assert str(error.value) == (
        "wanted one number of workers, got fixed workers=1 and world_size=2; give one of them"
    )
