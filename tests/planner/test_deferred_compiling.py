"""What compiles is tried once training has taken as long as compiling would, where nobody said for how long."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planned_candidates import make_candidate
from ridgeline.planner import Ranking
from ridgeline.planner.deferred_compiling import deferred_s, steps_before_compiling


def ranking(*candidates, steps: int | None = None) -> Ranking:
    return Ranking(candidates=candidates, error=0.1, steps=steps)


def untried(step_s: float = 1e-3, compile_s: float = 20.0):
    return make_candidate("compiled", step_s, compile_s)


EAGER = make_candidate("eager", 1e-3, is_measured=True)


@given(step_s=st.floats(1e-4, 1.0), compile_s=st.floats(0.5, 500.0))
def test_training_has_then_taken_as_long_and_not_a_step_longer(step_s, compile_s) -> None:
    eager = make_candidate("eager", step_s, is_measured=True)
    steps = steps_before_compiling(ranking(eager, untried(step_s, compile_s)), device="cpu")
    assert steps is not None
    assert steps * eager.step_s >= compile_s * (1 - 1e-9)
    assert steps == 1 or (steps - 1) * eager.step_s < compile_s * (1 + 1e-9)


def test_the_form_that_is_compiled_soonest_counts() -> None:
    other = make_candidate("step-graph", 1e-3, 5.0)
    assert steps_before_compiling(ranking(EAGER, untried(), other), device="cpu") == 5000
    assert deferred_s(ranking(EAGER, untried(), other), device="cpu") == pytest.approx(22.5)


@pytest.mark.parametrize(
    "found",
    [
        ranking(EAGER),
        ranking(EAGER, untried(), steps=100),
        ranking(EAGER, untried(step_s=1.5e-3)),
        ranking(EAGER, msgspec.structs.replace(untried(), failure="no")),
        ranking(EAGER, make_candidate("compiled", 2e-3, 9.0, is_measured=True), untried()),
        ranking(make_candidate("compiled", 1e-4, 9.0, is_measured=True), EAGER),
    ],
    ids=["nothing compiles", "steps are known", "cannot win", "failed", "tried", "in force"],
)
def test_nothing_is_tried_later_where_there_is_nothing_to_gain_or_it_was_weighed(found) -> None:
    assert steps_before_compiling(found, device="cpu") is None
