"""Predictions that rest on rates instead of timings: how much of a step, said in a note, with a wide error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.machine import Machine, OperatorTiming, Quantity, Setting
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.trials.untimed import ASSUMED_ERROR, UNTIMED_ERROR, Untimed
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from strategies import make_machine, make_workload

TWO = Setting(device="cpu", workers=1, threads=2)
EAGER = {"workers": 1, "threads": 2, "execution": "eager"}


def timed(keys: set[str], each_s: float = 1e-3) -> Machine:
    """A machine with timings of some operators."""
    seconds = Quantity.measured([each_s], "s")
    timings = tuple(OperatorTiming(setting=TWO, key=key, seconds=seconds) for key in sorted(keys))
    return msgspec.structs.replace(make_machine(settings=[TWO]), timings=timings)


def rank(machine: Machine, **more: object) -> Ranking:
    return choose(machine, make_workload(), world_size=1, fixed=EAGER, **more)


def about_timings(ranking: Ranking) -> list[str]:
    return [note for note in ranking.notes if "were not timed" in note]


def test_a_step_of_timed_operators_has_no_note() -> None:
    """Its error is that of a simulator."""
    ranking = rank(timed({op.key for op in make_workload().ops}))
    assert about_timings(ranking) == []
    assert ranking.error == ASSUMED_ERROR


def test_a_step_of_rates_says_so_and_claims_little() -> None:
    """The error that is told is that of steps without timings."""
    ranking = rank(make_machine(settings=[TWO]))
    (note,) = about_timings(ranking)
    assert note.startswith("9 of 9 operators of toy, 100.0 % of its predicted step, were not")
    assert ranking.error == pytest.approx(UNTIMED_ERROR)


def test_a_trial_tells_the_error_itself() -> None:
    """What was not timed stays noted, with what was claimed before, however far that was off."""
    machine = make_machine(settings=[TWO])

    def slower(plan: Plan) -> Timeline:
        measured = simulate(machine, make_workload(), plan)
        return msgspec.structs.replace(measured, steps_ns=(4 * measured.step_ns,))

    ranking = rank(machine, trial=slower)
    (note,) = about_timings(ranking)
    assert note.endswith("predictions before a trial are assumed to be right within 75.0 % only")
    assert ranking.error == pytest.approx(0.75)
    exact = rank(machine, trial=lambda plan: simulate(machine, make_workload(), plan))
    assert exact.error == ASSUMED_ERROR  # one trial that hits says little of the next


def test_untimed_operators_count_by_their_seconds() -> None:
    """An operator that is a large part of the step widens the error by that part."""
    keys = sorted({op.key for op in make_workload().ops if op.family != "view"})
    errors = [rank(timed(set(keys[:count]))).error for count in range(len(keys) + 1)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > errors[-1]


@given(st.floats(0.0, 1.0))
def test_the_error_lies_between_both(share: float) -> None:
    """Never below that of timed operators, never above that of steps without any."""
    assert ASSUMED_ERROR <= Untimed(1, 2, share).error <= UNTIMED_ERROR + 1e-12


def test_little_is_not_worth_a_word() -> None:
    """An operator without a timing beside others that take seconds changes nothing."""
    keys = sorted({op.key for op in make_workload().ops if op.family != "view"})
    assert len(about_timings(rank(timed(set(keys[1:]))))) == 1
    ranking = rank(timed(set(keys[1:]), each_s=10.0))
    assert about_timings(ranking) == []
    assert ranking.error == ASSUMED_ERROR
