"""What is tried first where one plan is expected to be far faster, and what is tried though time is over."""

import math

import msgspec
import pytest

from planned_candidates import make_candidate
from ridgeline.plan import Execution
from ridgeline.planner import Candidate
from ridgeline.planner.trials.trial_loop import Allowance
from ridgeline.planner.trials.trials import Room, next_trial


def _narrow(execution: Execution, step_s: float, compile_s: float = 0.0) -> Candidate:
    made = make_candidate(execution, step_s, compile_s)
    return msgspec.structs.replace(made, plan=msgspec.structs.replace(made.plan, precision="bf16"))


@pytest.mark.parametrize(
    ("program_s", "failure", "first"), [(0.6, "refused", 2), (2.0, "refused", 1), (0.2, "", 0)]
)
def test_what_is_far_faster_comes_before_the_compilers_defaults_in_another_precision(
    program_s: float, failure: str, first: int
) -> None:
    """Of a SIREN whose compiled bf16 form was refused, float32 took the time of one program four times faster."""
    candidates = [
        msgspec.structs.replace(_narrow("compiled+graph", 0.6, 9.0), failure=failure),
        make_candidate("compiled+graph", 2.5, 9.0),
        _narrow("step-graph", program_s, 12.0),
        make_candidate("eager", 2.6, is_measured=True),
    ]
    assert next_trial(candidates, Room(tries=9), device="cuda") == first


@pytest.mark.parametrize(
    ("execution", "seconds", "overhead_s", "is_tried"),
    [
        ("graph", None, 0.2, True),
        ("graph", 20.0, 0.2, False),
        ("graph", None, 9.0, False),
        ("step-graph", None, 0.2, False),
    ],
    ids=["brief", "seconds given", "long", "compiled"],
)
def test_a_brief_trial_is_begun_though_time_is_over(
    execution: Execution, seconds: float | None, overhead_s: float, is_tried: bool
) -> None:
    """A capture takes a second, and may take half of what the only program that was tried does."""
    compile_s = 0.0 if execution == "graph" else 1.0
    candidates = [
        make_candidate("compiled+graph", 0.02, 5.0, is_measured=True),
        _narrow(execution, 0.01, compile_s),
    ]
    allowance = Allowance(9, math.inf, seconds, None, "cuda", lambda: 60.0, first_compile_s=5.0)
    room = allowance.room(candidates, 1, overhead_s)
    assert next_trial(candidates, room, device="cuda") == (1 if is_tried else None)
