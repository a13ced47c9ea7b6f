"""Behind the search the plan that won is tried once more, its gradients exchanged by copies between GPUs."""

import msgspec
import pytest

from chained_workloads import make_chain
from ridgeline.errors import OutOfTimeError, PlanError
from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import DEFAULT_BUCKET_BYTES
from ridgeline.timeline import Timeline
from strategies import make_machine

COPIES = "copy_engine"
NOT_COMPARED = "ways to reduce that were not compared"


class Trials:
    """Trials that take what is predicted, by copies a share of it; keeps what was tried."""

    def __init__(self, by_copies: float, *, error: Exception | None = None) -> None:
        self.machine = make_machine(
            device="cuda", slowdown=(1.5, 1.0), num_gpus=2, rate=1e10, latency_s=1e-5
        )
        self.workload = make_chain((6, 6), device="cuda", elements=1 << 21)
        self.by_copies, self.error = by_copies, error
        self.tried: list[Plan] = []

    def __call__(self, plan: Plan) -> Timeline:
        self.tried.append(plan)
        share = 1.0
        if plan.sync.algorithm == COPIES:
            share = self.by_copies
            if self.error is not None:
                raise self.error
            plan = msgspec.structs.replace(
                plan, sync=msgspec.structs.replace(plan.sync, algorithm="all_reduce")
            )
        timeline = simulate(self.machine, self.workload, plan)
        steps = (round(timeline.step_ns * share),) * 20
        return msgspec.structs.replace(timeline, origin="measured", steps_ns=steps)

    def chosen(self, **known):
        settings = {"world_size": 2, "retrial": self, "trial": self, **known}
        return choose(self.machine, self.workload, **settings)

    @property
    def by_algorithm(self) -> list[str]:
        return [plan.sync.algorithm for plan in self.tried]


@pytest.mark.parametrize(
    ("share", "wins"), [(0.9, True), (0.98, True), (0.995, False), (1.1, False)]
)
def test_copies_are_chosen_where_they_were_faster_in_their_trial(share, wins) -> None:
    trials = Trials(share)
    ranking = trials.chosen()
    assert (ranking.best.plan.sync.algorithm == COPIES) is wins
    assert trials.by_algorithm.count(COPIES) == 1
    last = next(plan for plan in trials.tried if plan.sync.algorithm == COPIES)
    won = ranking.best.plan if not wins else last
    assert msgspec.structs.replace(last, sync=won.sync, choices=won.choices) == won
    assert last.sync.bucket_bytes == DEFAULT_BUCKET_BYTES
    assert MODES[last.execution].is_replayed_on("cuda")
    (note,) = [note for note in ranking.notes if note.startswith(NOT_COMPARED)]
    assert "copy engine" not in note
    choice = next(c for c in ranking.best.plan.choices if c.knob == "algorithm")
    assert choice.origin == "search"


def test_buckets_that_the_user_set_are_kept() -> None:
    trials = Trials(0.5)
    fixed = {"bucket_bytes": (12 << 20,)}
    assert trials.chosen(fixed=fixed).best.plan.sync.bucket_bytes == (12 << 20,)
    assert trials.by_algorithm.count(COPIES) == 1


@pytest.mark.parametrize(
    "known",
    [{"fixed": {"algorithm": "all_reduce"}}, {"fixed": {"execution": "eager"}}, {"world_size": 1}],
)
def test_what_is_fixed_alone_or_not_replayed_is_left_as_it_is(known) -> None:
    trials = Trials(0.5)
    ranking = trials.chosen(**known)
    assert COPIES not in trials.by_algorithm
    notes = [note for note in ranking.notes if note.startswith(NOT_COMPARED)]
    is_told = "copy engine (only the plan that won is tried with it" in "".join(notes)
    assert is_told is (known == {"fixed": {"execution": "eager"}})


def test_no_time_is_spent_where_none_is_left() -> None:
    trials = Trials(0.5)
    late = iter([0.0] * 6)
    trials.chosen(seconds=1000.0, clock=lambda: next(late, 1000.0))
    assert trials.tried
    assert COPIES not in trials.by_algorithm


@pytest.mark.parametrize("error", [PlanError("no shared memory"), RuntimeError("no peer access")])
def test_gpus_that_share_no_memory_lose_nothing(error) -> None:
    trials = Trials(0.5, error=error)
    ranking = trials.chosen()
    assert ranking.best.plan.sync.algorithm == "all_reduce"
    (failed,) = [c for c in ranking.candidates if c.plan.sync.algorithm == COPIES]
    assert str(error) in failed.failure


def test_time_that_is_up_in_it_leaves_what_was_known() -> None:
    trials = Trials(0.5, error=OutOfTimeError("too late"))
    assert trials.chosen().best.plan.sync.algorithm == "all_reduce"


@pytest.mark.parametrize(("latency_s", "is_tried"), [(1e-5, True), (1e-3, False)])
def test_copies_that_are_predicted_to_lose_are_not_tried(latency_s, is_tried) -> None:
    """Each bucket waits for three barriers, which take long where a message does."""
    trials = Trials(0.5)
    trials.machine = make_machine(
        device="cuda", slowdown=(1.0, 1.0), num_gpus=2, rate=1e10, latency_s=latency_s
    )
    trials.chosen()
    assert (COPIES in trials.by_algorithm) is is_tried
