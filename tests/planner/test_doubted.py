"""A profile measured beside load, or contradicted by far on plain plans, is measured again a few times at most."""

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planned_loads import make_loads

from ridgeline.machine import Machine, Quantity
from ridgeline.machine.host_load import HostLoad
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.doubted import FAR, MOST_RETAKES, said, suspicion, why_again
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from strategies import make_machine

LOADS = make_loads()
BUSY = HostLoad(others=0.5)
MACHINE = msgspec.structs.replace(make_machine(), measured_at="2026-03-01T07:00:00+00:00")


def changed(**marks: object) -> Machine:
    return msgspec.structs.replace(MACHINE, **marks)


def ranked(factors: dict[int, float], other: float = 1.0) -> Ranking:
    """Trials in which a plain step of so many workers takes a multiple of what is predicted of it."""

    def trial(plan: Plan) -> Timeline:
        predicted = simulate(MACHINE, LOADS[plan.workers], plan, details=False)
        factor = factors[plan.workers] if plan.execution == "eager" else other
        return msgspec.structs.replace(
            predicted, origin="measured", steps_ns=(round(predicted.step_ns * factor),)
        )

    loads = {count: LOADS[count] for count in factors}
    return choose(MACHINE, loads, trial=trial, tries=8)


def test_a_quiet_profile_is_believed() -> None:
    """Whatever little others took."""
    for machine in (MACHINE, changed(host_load=HostLoad(others=0.1, stolen=0.0))):
        assert why_again(machine) == ""
        assert said(machine) == ()


@given(st.integers(0, 2 * MOST_RETAKES))
def test_what_was_measured_beside_load_is_measured_again_a_few_times(retakes: int) -> None:
    """And said to be so for good."""
    machine = changed(host_load=BUSY, retakes=retakes)
    why = "the profile was measured while other programs used 50.0 % of the processors"
    assert why_again(machine) == (why if retakes < MOST_RETAKES else "")
    assert said(machine) == (f"{why}: what is predicted from it may be far off",)


@pytest.mark.parametrize("retakes", [0, 1, 2])
def test_what_is_suspect_is_measured_again_once(retakes: int) -> None:
    """Else the same model would have the same machine measured for ever."""
    machine = changed(suspect="it is off", retakes=retakes)
    assert why_again(machine) == ("it is off" if retakes == 0 else "")
    assert said(machine) == ("it is off",)


@settings(max_examples=20)
@given(st.floats(0.2, 5.0))
def test_suspect_is_what_misses_the_plain_step_by_half(factor: float) -> None:
    """Too much or too little alike."""
    error = 1.0 / factor - 1.0
    assume(abs(abs(error) - FAR) > 1e-6)  # times are whole nanoseconds
    assert bool(suspicion(MACHINE, ranked({1: factor}))) is (abs(error) > FAR)


def test_the_suspicion_names_both_times() -> None:
    """When it was measured, what it predicted, what the trial took."""
    assert suspicion(MACHINE, ranked({1: 0.4})) == (
        "the profile measured at 2026-03-01T07:00:00+00:00 predicted 241 ms for a plain step whose trial took "
        "96.2 ms"
    )


def test_assumed_rates_are_not_the_profiles() -> None:
    """They were never measured, so nothing is said of when they were, nor is a start told to measure again."""
    machine = changed(
        ceilings=tuple(
            msgspec.structs.replace(c, rate=Quantity.assumed(c.rate.value, c.rate.unit))
            for c in MACHINE.ceilings
        )
    )
    assert suspicion(MACHINE, ranked({1: 0.4}))
    assert suspicion(machine, ranked({1: 0.4})) == ""


def test_misses_in_both_directions_are_not_the_machines() -> None:
    """Nor those of plans that compile, or what only one number of workers shows."""
    assert suspicion(MACHINE, ranked({1: 0.4, 2: 0.4}))
    assert not suspicion(MACHINE, ranked({1: 0.4, 2: 3.0}))
    assert not suspicion(MACHINE, ranked({1: 0.4, 2: 1.0}))
    assert not suspicion(MACHINE, ranked({1: 1.0}, other=0.3))


def test_without_trials_nothing_is_suspected() -> None:
    """A prediction does not contradict itself."""
    assert suspicion(MACHINE, choose(MACHINE, LOADS)) == ""
