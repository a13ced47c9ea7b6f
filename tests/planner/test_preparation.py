"""Compiling costs time: it is weighed where the steps are known, stated where not, and bounds the trials."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chained_workloads import make_chain
from planned_candidates import make_candidate
from ridgeline.errors import CaptureError, PlanError
from ridgeline.plan import Execution, Plan
from ridgeline.planner import choose
from ridgeline.planner.preparation import allowed_s, break_even_steps, compile_budget_s
from ridgeline.planner.search import UNTRIED
from ridgeline.planner.trials.trial_loop import Allowance
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from strategies import make_machine


class Trial:
    """Pretends to run plans: the prediction, and what preparing took by execution."""

    def __init__(self, machine, workload, prepared_s: dict[str, float] | None = None) -> None:
        self.machine, self.workload, self.prepared_s = machine, workload, prepared_s or {}
        self.executions: list[str] = []

    def __call__(self, plan: Plan) -> Timeline:
        self.executions.append(plan.execution)
        predicted = simulate(self.machine, self.workload, plan, details=False)
        prepared = self.prepared_s.get(plan.execution)
        return msgspec.structs.replace(
            predicted,
            origin="measured",
            steps_ns=(predicted.step_ns,) * 5,
            counters={} if prepared is None else {"compile_s": prepared},
        )


def _launch_bound() -> tuple:
    """A GPU whose launches cost, with a step whose operators can be joined: compiling gains a lot."""
    machine = make_machine(device="cuda", launch_s=1e-5, dispatch_s=2e-2, graph_gap_s=1e-2)
    return machine, make_chain((4, 4), device="cuda", elements=1 << 10)


def test_short_runs_do_not_compile() -> None:
    """A mode with a faster step that is never earned back stays behind, and the order says why."""
    machine, workload = _launch_bound()
    unknown = choose(machine, workload)
    assert unknown.best.plan.execution == "step-graph"
    short = choose(machine, workload, steps=30)
    assert short.best.plan.execution == "graph"
    totals = [c.total_s(30) for c in short.candidates]
    assert totals == sorted(totals)
    assert short.steps == 30
    long = choose(machine, workload, steps=100_000)
    assert long.best.plan.execution == "step-graph"


def test_the_sum_is_said() -> None:
    """With known steps every reason gives the whole run as compiling plus steps, and the break-even."""
    machine, workload = _launch_bound()
    ranking = choose(machine, workload, steps=30)
    whys = {c.plan.execution: c.why for c in ranking.candidates}
    assert whys["graph"] == (
        "the fastest predicted: 286 ms a step; the run takes 8.59 s = 30 x 286 ms"
    )
    assert whys["compiled+graph"] == (
        "predicted 0.580 x the time per sample of the chosen plan; the run takes 11.3 s = 6.32 s of "
        "compiling + 30 x 166 ms, earned back against eager after 17 steps"
    )
    assert ranking.choice("execution").reason.startswith("over 30 steps this takes 8.59 s = ")


def test_what_is_not_weighed_is_said() -> None:
    """Without known steps the time of compiling stands in the reason."""
    machine = make_machine(device="cuda", launch_s=1e-5, dispatch_s=3e-2, graph_gap_s=1e-2)
    ranking = choose(machine, make_chain((4, 4), device="cuda", elements=1 << 10))
    assert ranking.best.plan.execution == "step-graph"
    assert ranking.best.why == (
        "the fastest predicted: 126 ms a step; 7.10 s of compiling are not weighed, as the number of steps "
        "is unknown: earned back against eager after 10 steps"
    )
    graph = next(c for c in ranking.candidates if c.plan.execution == "graph")
    assert "compiling" not in graph.why


def test_a_reason_tells_trials_from_predictions() -> None:
    """Where preparing a tried plan took longer than expected, a prediction may look better; it was not tried."""
    machine, workload = _launch_bound()
    trial = Trial(machine, workload, {"graph": 1000.0})
    ranking = choose(machine, workload, steps=60, trial=trial, tries=1)
    assert trial.executions == ["graph"]
    reason = ranking.choice("execution").reason
    assert reason.startswith("over 60 steps this takes ")
    assert reason.endswith(", predicted and not tried")


def test_where_time_ran_out_nothing_is_compiled_untried() -> None:
    """Seconds bound the choice: a program that nobody had the time to try would be compiled after them."""
    machine, workload = _launch_bound()
    trial = Trial(machine, workload)
    late = choose(machine, workload, trial=trial, seconds=10.0, clock=lambda: 11.0)
    assert trial.executions == []
    assert late.best.plan.execution == "graph"
    assert late.choice("execution").reason == (
        "the best plan with step-graph is predicted 55.9 % faster, but was not tried"
    )
    assert UNTRIED in late.notes
    assert [c.plan.execution for c in late.candidates[:3]] == ["graph", "eager", "step-graph"]
    only = choose(
        machine,
        workload,
        fixed={"execution": "compiled"},
        trial=trial,
        seconds=10.0,
        clock=lambda: 11.0,
    )
    assert only.best.plan.execution == "compiled"


def test_an_untried_gain_of_compiling_is_doubted() -> None:
    """A mode that compiles displaces a plain one only by more than a quarter, unless both were tried."""
    machine = make_machine(device="cuda", graph_gap_s=1e-9)
    workload = make_chain((1, 2), device="cuda", flops=30_000_000)
    ranking = choose(machine, workload)
    by_mode = {c.plan.execution: c.sample_s for c in ranking.candidates}
    assert by_mode["step-graph"] < by_mode["graph"] < 1.25 * by_mode["step-graph"]
    assert ranking.best.plan.execution == "eager"
    assert (
        "which is within the uncertainty of 25.0 %, so the simpler plan is kept" in ranking.best.why
    )
    assert (
        "what compiling does is assumed (kernels as fast as their bytes): untried modes that compile are "
        "assumed to be right within 25.0 % only" in ranking.notes
    )
    tried = choose(machine, workload, trial=Trial(machine, workload))
    assert tried.best.plan.execution == "step-graph"


def test_what_a_trial_measured_replaces_the_estimate() -> None:
    """The preparation that a trial counted decides, also that of a plain graph."""
    machine, workload = _launch_bound()
    cheap = Trial(machine, workload, {"step-graph": 0.5, "graph": 0.25})
    ranking = choose(machine, workload, steps=10_000, trial=cheap)
    assert ranking.best.plan.execution == "step-graph"
    assert ranking.best.compile_s == 0.5
    assert "500 ms of compiling + 10000 x 126 ms" in ranking.best.why
    programs = dict.fromkeys(("step-graph", "compiled+graph", "regional+graph"), 1e6)
    dear = Trial(machine, workload, {**programs, "graph": 0.25})
    best = choose(machine, workload, steps=10_000, trial=dear).best
    assert best.plan.execution == "graph"
    assert "250 ms of preparing + 10000 x 286 ms" in best.why


def test_trials_stay_within_their_budget() -> None:
    """Compiling for trials takes at most a quarter of a known run, and the rest says so."""
    machine, workload = _launch_bound()
    trial = Trial(machine, workload)
    ranking = choose(machine, workload, steps=60, trial=trial)
    assert trial.executions == ["graph"]
    assert (
        "step-graph was not tried: compiling it takes about 7.10 s, and trials may spend 4.29 s on compiling"
        in ranking.notes
    )
    longer = Trial(machine, workload)
    choose(machine, workload, steps=1200, trial=longer)
    assert "step-graph" in longer.executions


def test_unknown_runs_have_a_budget_too() -> None:
    """On a GPU the step is compiled once however long that takes; then half of it is left for others."""
    candidates = [
        make_candidate("compiled+graph", 1.0, 90.0),
        make_candidate("graph", 2.0),
        make_candidate("eager", 4.0),
    ]
    assert compile_budget_s(candidates, None, device="cuda", share=0.25) == math.inf
    assert compile_budget_s(candidates, 100, device="cpu", share=0.25) == 50.0
    assert compile_budget_s(candidates[:1], 100, device="cpu", share=0.25) == 0.25 * 190
    assert allowed_s(None, None, None) == math.inf
    assert allowed_s(90.0, None, None) == 1.5 * 90.0 + 15.0
    assert allowed_s(90.0, 1000, None) == math.inf
    assert allowed_s(90.0, None, 30.0) == 30.0


def test_the_first_that_was_tried_says_how_long_the_others_may_take() -> None:
    """Not the first in the ranking; nor one that failed, whose compiling may have ended anywhere."""
    first = make_candidate("regional+graph", 2.0, 20.0, is_measured=True)
    second = make_candidate("compiled+graph", 1.0, 90.0, is_measured=True)
    failed = make_candidate("compiled", 1.0, 5.0)
    plain = make_candidate("eager", 3.0, is_measured=True)
    allowance = Allowance(9, math.inf, None, None, "cuda", lambda: 0.0)
    for tried in (plain, failed, first, second):
        allowance = allowance.after(tried)
    room = allowance.room([second, failed, first, plain], 3, 0.0)
    assert room.seconds == 1.5 * 20.0 + 15.0


def test_scripts_on_a_cpu_do_not_wait_for_the_compiler() -> None:
    """Of unknown length on a CPU nothing is compiled for a trial, and that is said."""
    machine = make_machine(dispatch_s=1e-3, rate=1e12)
    workload = make_chain((4,) * 4, elements=1 << 10)
    trial = Trial(machine, workload)
    ranking = choose(machine, workload, trial=trial)
    assert trial.executions == ["eager"]
    assert ranking.best.plan.execution == "eager"
    assert (
        "packaged was not tried: compiling it takes about 9.22 s, and trials compile nothing on a CPU while "
        "the number of steps is unknown" in ranking.notes
    )
    known = Trial(machine, workload)
    choose(machine, workload, trial=known, steps=10_000)
    assert "packaged" in known.executions


def test_a_failed_capture_leaves_the_plain_plan() -> None:
    """What could not be captured stands last with its reason, and nothing untried takes its place."""
    machine, workload = _launch_bound()

    def trial(plan: Plan) -> Timeline:
        if plan.execution != "eager":
            raise CaptureError(f"no capture of {plan.execution}")
        return Trial(machine, workload)(plan)

    ranking = choose(machine, workload, trial=trial, tries=9)
    assert ranking.best.plan.execution == "eager"
    failed = {c.plan.execution: c.failure for c in ranking.candidates if c.failure}
    assert failed["step-graph"] == "no capture of step-graph"
    assert [c.plan.execution for c in ranking.candidates[-len(failed) :]] == list(failed)

    def broken(plan: Plan) -> Timeline:
        if plan.execution in ("eager", "graph"):
            return Trial(machine, workload)(plan)
        raise TypeError(f"no kernel of {plan.execution}\nmore of it")

    ranking = choose(machine, workload, trial=broken, tries=9)
    failed = {c.plan.execution: c.failure for c in ranking.candidates if c.failure}
    assert failed["step-graph"] == "TypeError: no kernel of step-graph"
    assert ranking.best.plan.execution == "graph"
    with pytest.raises(TypeError, match="no kernel of compiled"):  # nothing else was to be compared
        choose(machine, workload, trial=broken, fixed={"execution": "compiled"})

    def nothing(plan: Plan) -> Timeline:
        raise PlanError("out of order")

    with pytest.raises(
        PlanError, match=r"^wanted a plan that runs, got \d that failed; the first, "
    ):
        choose(machine, workload, trial=nothing, tries=9)


@given(
    st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(0.0, 100.0)), min_size=1, max_size=5),
    st.integers(1, 100_000),
)
def test_the_order_is_that_of_the_whole_run(modes: list, steps: int) -> None:
    """Cost per sample orders candidates as compile + steps x step does; without steps the step alone."""
    candidates = [make_candidate("compiled", step_s, compile_s) for step_s, compile_s in modes]
    by_cost = sorted(candidates, key=lambda c: c.cost_s(steps))
    totals = [c.compile_s + steps * c.step_s for c in by_cost]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(totals))
    assert [c.cost_s(None) for c in candidates] == [c.step_s for c in candidates]


@given(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0), st.floats(1e-3, 1000.0))
def test_break_even(step_s: float, eager_s: float, compile_s: float) -> None:
    """At the break-even the sum is no more than the eager run's, one step before it is no less."""
    candidate, eager = (
        make_candidate("compiled", step_s, compile_s),
        make_candidate("eager", eager_s),
    )
    steps = break_even_steps(candidate, eager)
    assert break_even_steps(candidate, None) is None
    if candidate.step_s >= eager.step_s:
        assert steps is None
        return
    assert steps is not None
    gain = eager.step_s - candidate.step_s
    assert steps >= 1
    assert steps * gain >= compile_s * (1 - 1e-9)
    assert (steps - 1) * gain <= compile_s * (1 + 1e-9) or steps == 1
    assert math.isfinite(steps)


@pytest.mark.parametrize(
    ("device", "executions"),
    [
        ("cpu", ("eager", "compiled", "regional", "step-graph", "packaged")),
        (
            "cuda",
            (
                "eager",
                "compiled",
                "regional",
                "graph",
                "compiled+graph",
                "regional+graph",
                "step-graph",
                "packaged",
            ),
        ),
    ],
)
def test_every_mode_can_be_fixed(device: str, executions: tuple[Execution, ...]) -> None:
    """What steps offer on a device can be asked for, and is then all that is compared."""
    machine, workload = make_machine(device=device), make_chain((2, 2), device=device)
    for execution in executions:
        ranking = choose(machine, workload, fixed={"execution": execution})
        assert {c.plan.execution for c in ranking.candidates} == {execution}


def test_searched_modes() -> None:
    """A worker alone also compares one program; regions only where there are blocks."""

    def searched(device: str, workers: int, **more: bool) -> list[str]:
        workload = make_chain((2, 2), device=device, **more)
        ranking = choose(make_machine(device=device), workload, world_size=workers)
        return sorted({c.plan.execution for c in ranking.candidates})

    assert searched("cpu", 1) == ["compiled", "eager", "packaged", "step-graph"]
    assert searched("cpu", 2) == ["compiled", "eager"]
    graphs = ["compiled", "compiled+graph", "eager", "graph", "regional+graph"]
    assert searched("cuda", 1) == [*graphs, "step-graph"]
    assert searched("cuda", 2) == graphs
    assert searched("cuda", 2, is_numbered=False) == graphs[:4]
    unnumbered = make_chain((2, 2), device="cuda", is_numbered=False)
    assert (
        "left out: 1 worker, regional+graph: no module path names numbered blocks to compile one by one"
        in choose(make_machine(device="cuda"), unnumbered).notes
    )
