"""Plans that lie close are tried again in turns, so that a machine that changes its speed decides nothing."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chained_workloads import make_chain
from planned_candidates import make_candidate
from ridgeline.errors import CaptureError, ObstacleError, OutOfTimeError
from ridgeline.execution import MODES
from ridgeline.plan import Execution, Plan
from ridgeline.planner import Candidate, choose
from ridgeline.planner.trials.run_off import CLOSE, finalists, run_off
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from strategies import make_machine


def took(candidate: Candidate, step_ns: int) -> Timeline:
    return msgspec.structs.replace(candidate.timeline, steps_ns=(step_ns,) * 20)


def pair(plain_ns: int, other_ns: int, other: Execution = "compiled") -> list[Candidate]:
    made = [make_candidate("eager", 1e-3), make_candidate(other, 1e-3)]
    return [
        msgspec.structs.replace(c, measured=took(c, ns))
        for c, ns in zip(made, (plain_ns, other_ns), strict=True)
    ]


class Machine:
    """Trials on a machine that gets slower by the same step from trial to trial."""

    def __init__(self, candidates: list[Candidate], true_ns: dict[str, int], drift_ns: int) -> None:
        self.by_plan = {c.plan.execution: c for c in candidates}
        self.true_ns, self.drift_ns = true_ns, drift_ns
        self.order: list[str] = []

    def __call__(self, plan: Plan) -> Timeline:
        self.order.append(plan.execution)
        slower = len(self.order) * self.drift_ns
        return took(self.by_plan[plan.execution], self.true_ns[plan.execution] + slower)


def settled(candidates: list[Candidate], retrial, left_s: float = 1e9) -> list[Candidate]:
    found, _ = run_off(candidates, retrial, device="cpu", fixed={}, left_s=left_s)
    return found


@given(
    plain=st.integers(1_000_000, 2_000_000),
    compiled=st.integers(1_000_000, 2_000_000),
    drift=st.integers(0, 500_000),
)
def test_a_steady_drift_weighs_on_both_alike(plain, compiled, drift) -> None:
    candidates = pair(1_100_000, 1_000_000)
    machine = Machine(candidates, {"eager": plain, "compiled": compiled}, drift)
    found = settled(candidates, machine)
    means = [sum(c.measured.steps_ns) / len(c.measured.steps_ns) for c in found]
    assert means[1] - means[0] == pytest.approx(compiled - plain)
    assert machine.order == ["eager", "compiled", "compiled", "eager"]


def test_a_lead_that_no_drift_explains_is_left_alone() -> None:
    lead = 1.0 - CLOSE["cpu"]
    assert finalists(pair(1_000_000, int(lead * 1e6) - 1), device="cpu") is None
    assert finalists(pair(1_000_000, int(lead * 1e6) + 1), device="cpu") is not None
    assert finalists(pair(1_000_000, 960_000, "graph"), device="cuda") is not None
    assert finalists(pair(1_000_000, 940_000, "graph"), device="cuda") is None


@pytest.mark.parametrize(
    ("step_ns", "lead", "other", "is_run"),
    [
        (2_000_000_000, 0.02, "graph", False),
        (2_000_000_000, 0.04, "graph", True),
        (2_000_000_000, 0.02, "compiled", True),
        (1_000_000, 0.02, "graph", True),
    ],
)
def test_a_long_run_off_is_left_out_where_predictions_say_the_same(
    step_ns: int, lead: float, other: Execution, is_run: bool
) -> None:
    """Both steps are predicted to take equal time; what compiles is not predicted that well."""
    candidates = pair(step_ns, int(step_ns * (1.0 - lead)), other)
    machine = Machine(candidates, {"eager": step_ns, other: step_ns}, 0)
    settled(candidates, machine)
    assert bool(machine.order) == is_run


@pytest.mark.parametrize("other", ["compiled", "graph"])
def test_what_is_plain_and_fastest_has_no_rival(other: Execution) -> None:
    assert finalists(pair(1_000_000, 1_000_001, other), device="cpu") is None
    assert finalists(pair(1_000_000, 1_000_001, "graph"), device="cuda") is None


@pytest.mark.parametrize(
    ("lead", "is_close"), [(0.35, False), (0.25, True), (-0.25, True), (-0.5, False)]
)
def test_what_the_host_of_a_gpu_issues_is_tried_again(lead: float, is_close: bool) -> None:
    """Its speed drifts, whichever of them was the faster one; another device's does not say so."""
    candidates = pair(1_000_000, round(1e6 * (1.0 - lead)))
    found = finalists(candidates, device="cuda")
    assert (found is not None) is is_close
    if found is not None:
        fastest = min(candidates, key=lambda c: c.step_s)
        assert found[0] is fastest


def test_nothing_is_tried_again_where_no_time_is_left() -> None:
    candidates = pair(1_100_000, 1_000_000)
    machine = Machine(candidates, {"eager": 1, "compiled": 1}, 0)
    assert settled(candidates, machine, left_s=0.1) == candidates
    assert not machine.order


def test_what_fails_the_second_time_is_not_chosen() -> None:
    candidates = pair(1_100_000, 1_000_000)

    def retrial(plan: Plan) -> Timeline:
        if plan.execution == "compiled":
            raise CaptureError("not any more")
        return took(candidates[0], 1_100_000)

    found = settled(candidates, retrial)
    assert (found[1].failure, found[1].measured) == ("not any more", None)
    assert found[0] == candidates[0]


@pytest.mark.parametrize("slow_first", [True, False])
def test_choose_takes_the_plan_that_wins_the_run_off(slow_first) -> None:
    """The plain plan met a slow moment in its only trial; compiling gains nothing."""
    machine, workload = make_machine(), make_chain(device="cpu")
    calls = itertools.count()

    def trial(plan: Plan) -> Timeline:
        timeline = simulate(machine, workload, plan)
        ns = 1_000_000 if next(calls) or not slow_first else 1_400_000
        return msgspec.structs.replace(timeline, steps_ns=(ns,) * 20)

    def retrial(plan: Plan) -> Timeline:
        timeline = simulate(machine, workload, plan)
        return msgspec.structs.replace(timeline, steps_ns=(1_000_000,) * 20)

    fixed = {"threads": 2}
    known = {"world_size": 1, "fixed": fixed, "seconds": 1e6, "trial": trial}
    best = choose(machine, workload, retrial=retrial, **known).best
    assert best.plan.execution == "eager"
    calls = itertools.count()
    alone = choose(machine, workload, **known).best
    assert (alone.plan.execution == "eager") is not slow_first


def test_time_that_is_up_in_a_run_off_leaves_what_was_known() -> None:
    machine, workload = make_machine(), make_chain(device="cpu")

    def trial(plan: Plan) -> Timeline:
        return simulate(machine, workload, plan)

    def retrial(plan: Plan) -> Timeline:
        raise OutOfTimeError("too late")

    known = {"world_size": 1, "fixed": {"threads": 2}, "seconds": 1e6, "trial": trial}
    with_it = choose(machine, workload, retrial=retrial, **known)
    assert with_it.best.plan == choose(machine, workload, **known).best.plan


@pytest.mark.parametrize(("seconds", "is_run"), [(None, True), (1000.0, False)])
def test_a_run_off_takes_some_seconds_though_compiling_took_all(seconds, is_run) -> None:
    """On a GPU, whose host may have been slow in the trial of the plan that lost; not of given seconds."""
    machine = make_machine(device="cuda", dispatch_s=1e-3, launch_s=1e-3, rate=1e11)
    workload = make_chain((30, 30), device="cuda", elements=1 << 12)
    again: list[str] = []

    def trial(plan: Plan) -> Timeline:
        if MODES[plan.execution].is_captured or MODES[plan.execution].is_one_program:
            raise ObstacleError("no graph holds it")
        return took_ns(plan, 1_000_000)

    def took_ns(plan: Plan, ns: int) -> Timeline:
        timeline = simulate(machine, workload, plan)
        return msgspec.structs.replace(timeline, origin="measured", steps_ns=(ns,) * 20)

    def retrial(plan: Plan) -> Timeline:
        again.append(plan.execution)
        return took_ns(plan, 900_000 if plan.execution == "compiled" else 1_000_000)

    clock = itertools.chain([0.0] * 4, itertools.repeat(999.9))
    known = {"world_size": 1, "seconds": seconds, "trial": trial, "tries": 99}
    ranking = choose(machine, workload, retrial=retrial, clock=lambda: next(clock), **known)
    assert bool(again) is is_run
    assert (ranking.best.plan.execution == "compiled") is is_run
