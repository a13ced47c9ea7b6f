"""Candidates with a predicted step, and a trial that found just that."""

import msgspec

from ridgeline.plan import Execution, Plan
from ridgeline.planner import Candidate
from strategies import make_timeline

S = 1_000_000_000


def make_candidate(
    execution: Execution, step_s: float, compile_s: float = 0.0, *, is_measured: bool = False
) -> Candidate:
    """A plan of that execution; measured as predicted where it is."""
    end = round(step_s * S)
    predicted = make_timeline(
        [("step", "compute", 0, end)],
        origin="predicted",
        counters={"compile_s": compile_s} if compile_s else {},
    )
    measured = msgspec.structs.replace(predicted, origin="measured") if is_measured else None
    return Candidate(plan=Plan(execution=execution), timeline=predicted, measured=measured, why="")
