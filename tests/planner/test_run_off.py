"""Plans that lie close are tried again in turns, so that a machine that changes its speed decides nothing."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chained_workloads import make_chain
from planned_candidates import make_candidate
from ridgeline.errors import CaptureError, OutOfTimeError
from ridgeline.plan import Plan
from ridgeline.planner import Candidate, choose
from ridgeline.planner.run_off import CLOSE, finalists, run_off
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from strategies import make_machine


def took(candidate: Candidate, step_ns: int) -> Timeline:
    return msgspec.structs.replace(candidate.timeline, steps_ns=(step_ns,) * 20)


def pair(plain_ns: int, compiled_ns: int) -> list[Candidate]:
    made = [make_candidate("eager", 1e-3), make_candidate("compiled", 1e-3)]
    return [
        msgspec.structs.replace(c, measured=took(c, ns))
        for c, ns in zip(made, (plain_ns, compiled_ns), strict=True)
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
    assert finalists(pair(1_000_000, 960_000), device="cuda") is not None
    assert finalists(pair(1_000_000, 940_000), device="cuda") is None


def test_what_is_plain_and_fastest_has_no_rival() -> None:
    assert finalists(pair(1_000_000, 1_000_001), device="cpu") is None


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
