"""Whether the code that torch's compiler made for a plan covers the whole step."""

from collections import Counter
from collections.abc import Sequence
from math import prod

from ridgeline import units
from ridgeline.compiled_program import CompilerProgram, Shape
from ridgeline.execution import MODES, Form
from ridgeline.plan import Plan
from ridgeline.workload import Workload

LEAST_COVERED = 0.9
"""Share of the parameters that programs take, from which on they are the whole step."""

_CALLED_ONCE: tuple[Form, ...] = ("compiled", "step-graph", "packaged")
"""Forms of which each program is called once a step. A block compiled by itself serves all its copies."""


def why_unread(workload: Workload, plan: Plan, programs: Sequence[CompilerProgram]) -> str:
    """Why the programs do not tell how a step is run; empty where they do, or where there are none.

    What the compiler could not translate runs between its programs as it was written. And of what it
    translated more than once, only a part is called.

    `programs` are all that the compiler made for one worker under the plan.
    """
    if not programs:
        return ""
    if MODES[plan.execution].form not in _CALLED_ONCE:
        return "its programs are called more than once a step"
    if plan.accumulate > 1:
        return "its programs compute micro-batches, and the trace is of the whole batch"
    # By shapes, as the compiler's programs know their inputs by nothing else.
    wanted = Counter(parameter.shape for parameter in workload.parameters)
    forward = [program for program in programs if program.phase == "forward"]
    got = Counter(shape for program in forward for shape in program.inputs)
    total = _elements(wanted)
    covered = _elements(wanted & got)
    if covered < LEAST_COVERED * total:
        return (
            f"its programs take {units.percent(covered / total)} of the parameters, and the rest runs as it "
            "was written"
        )
    # A second translation takes all parameters once more.
    again = Counter({shape: got[shape] - count for shape, count in wanted.items()})
    if len(forward) > 1 and _elements(+again) >= LEAST_COVERED * total:
        return "the step was translated more than once, and nothing tells which of its programs ran"
    return ""


def _elements(shapes: Counter[Shape]) -> int:
    return sum(count * prod(shape) for shape, count in shapes.items())
