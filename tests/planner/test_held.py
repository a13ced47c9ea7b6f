"""Which steps that hold buckets are compared, and when one is taken."""

from collections.abc import Callable

import msgspec
import pytest

from layer_chains import MB, MS, chain
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.planner.exchanges.held import (
    LEAST_HELD_GAIN,
    NOT_RUN,
    UNTIMED,
    fastest_held,
    held_plans,
    why_not_held,
)
from ridgeline.planner.labels import label
from ridgeline.planner.ranking import Ranking
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import holds
from ridgeline.timeline import Timeline
from ridgeline.workload import CLIPPING, Workload
from strategies import make_machine, make_op

SLOW, FAST = 1e8, 1e12
"""Bytes per second: a parameter takes as long as six of its layers, or nothing."""
EAGER = {"execution": "eager"}


def layers(device: str = "cpu") -> Workload:
    """Eight layers of 4 MB."""
    return chain([4 * MB] * 8, [5 * MS] * 8, [10 * MS] * 8, device=device)


def held_in(ranking: Ranking) -> list[Plan]:
    return [c.plan for c in ranking.candidates if holds(c.plan.sync)]


def trial_of(seconds: Callable[[Plan], float]) -> Callable[..., Timeline]:
    """A trial in which a plan takes so long."""

    def trial(plan: Plan, *_: object) -> Timeline:
        step_ns = round(seconds(plan) * 1e9)
        return Timeline(
            origin="measured", title="toy", workers=plan.workers, spans=(), steps_ns=(step_ns,) * 9
        )

    return trial


def test_one_is_offered_where_communication_is_exposed() -> None:
    """One for a number of workers, faster than all that wait as predicted; its label tells it."""
    machine = make_machine(bandwidth=SLOW)
    ranking = choose(machine, layers(), world_size=2, fixed=EAGER)
    (held,) = held_in(ranking)
    waiting = [c.timeline.step_ns for c in ranking.candidates if not holds(c.plan.sync)]
    step_ns = simulate(machine, layers(), held).step_ns
    assert step_ns < min(waiting) * (1.0 - LEAST_HELD_GAIN)
    assert f"{held.sync.options['held']} held" in label(held)
    assert held.exact


def test_none_is_offered_where_it_is_hidden() -> None:
    """Behind backward."""
    ranking = choose(make_machine(bandwidth=FAST), layers(), world_size=2, fixed=EAGER)
    assert held_in(ranking) == []
    assert not [note for note in ranking.notes if "held" in note]


@pytest.mark.parametrize(
    "fixed",
    [
        {"options": {}},
        {"algorithm": "ring"},
        {"compression": "bf16"},
        {"every": 4},
        {"execution": "compiled"},
    ],
)
def test_what_is_fixed_otherwise_is_left(fixed: dict[str, object]) -> None:
    """By the user."""
    machine = make_machine(bandwidth=SLOW)
    ranking = choose(machine, layers(), world_size=2, fixed={**EAGER, **fixed})
    assert held_in(ranking) == []


def test_over_nccl_it_is_not_offered_and_a_note_says_why() -> None:
    """It was never run there."""
    machine = make_machine(device="cuda", bandwidth=SLOW)
    ranking = choose(machine, layers("cuda"), world_size=2, fixed=EAGER)
    assert held_in(ranking) == []
    assert NOT_RUN in ranking.notes
    assert why_not_held(layers("cuda"), Plan(workers=2)) == "over NCCL it was never run"


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (
            msgspec.structs.replace(make_op("optimizer"), module=CLIPPING),
            "gradients are clipped by the norm of all of them",
        ),
        (
            make_op("optimizer", family="reduction"),
            "the optimizer looks at more than one element, or at all parameters",
        ),
        (
            make_op("optimizer", family="elementwise", name="aten._fused_adam_.default"),
            "the optimizer looks at more than one element, or at all parameters",
        ),
    ],
)
def test_what_its_trace_rules_out_is_not_offered(op: object, reason: str) -> None:
    """As the runtime would refuse it."""
    workload = layers()
    workload = msgspec.structs.replace(workload, ops=(*workload.ops, op))
    assert why_not_held(workload, Plan(workers=2)) == reason
    assert why_not_held(layers(), Plan(workers=2)) == ""
    ranking = choose(make_machine(bandwidth=SLOW), workload, world_size=2, fixed=EAGER)
    assert held_in(ranking) == []


def test_the_simulator_chooses_how_many() -> None:
    """Of one cut, no other number is predicted to be faster; one bucket holds none."""
    machine, workload = make_machine(bandwidth=SLOW), layers()
    plan = Plan(workers=2, threads=1)
    best = fastest_held(machine, workload, plan, [(MB,)])
    assert best is not None
    least = simulate(machine, workload, best).step_ns
    for number in range(1, 8):
        sync = msgspec.structs.replace(best.sync, options={"held": number})
        other = msgspec.structs.replace(best, sync=sync)
        assert least <= simulate(machine, workload, other).step_ns or number == 5
    assert fastest_held(machine, workload, plan, [(100 * MB,)]) is None


def test_at_most_one_for_a_number_of_workers() -> None:
    """However many plans wait."""
    machine = make_machine(bandwidth=SLOW, cores=4)
    loads = {2: layers(), 4: layers()}
    plans = [
        Plan(workers=workers, threads=1, precision=precision)
        for workers in loads
        for precision in ("as-is", "bf16")
    ]
    found = held_plans(machine, loads, {}, plans)
    assert [plan.workers for plan in found] == [2, 4]


@pytest.mark.parametrize(("held_s", "is_taken"), [(0.2, True), (0.6, False)])
def test_a_trial_decides(held_s: float, is_taken: bool) -> None:
    """Whatever was predicted."""
    trial = trial_of(lambda plan: held_s if holds(plan.sync) else 0.4)
    machine = make_machine(bandwidth=SLOW)
    ranking = choose(machine, layers(), world_size=2, fixed=EAGER, trial=trial)
    assert holds(ranking.best.plan.sync) == is_taken
    assert len(held_in(ranking)) == 1
    if is_taken:
        choice = ranking.choice("options")
        assert choice.value.startswith("held=")
        assert choice.origin == "search"
        assert choice.reason == "measured 2.00 x as fast as the best plan with none"


def test_without_a_trial_of_its_own_it_is_not_taken() -> None:
    """Where others were tried: nothing else tells whether the script can be updated so."""
    machine = make_machine(bandwidth=SLOW)
    trial = trial_of(lambda plan: 10.0 if holds(plan.sync) else 0.4)
    ranking = choose(machine, layers(), world_size=2, fixed=EAGER, trial=trial, tries=0)
    assert held_in(ranking) == []
    assert [note for note in ranking.notes if note.endswith(UNTIMED)]
