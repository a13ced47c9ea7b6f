"""What a trial read of the compiler's programs, put to use: plans with the same program are predicted again.

One compilation shows what the compiler makes of a step. Plans that differ in the optimizer, in who replays
the program or in how its small kernels are joined have the same operators in the same kernels, or nearly.
"""

from collections.abc import Sequence

import msgspec

from ridgeline.compiled_program import CompilerProgram
from ridgeline.errors import MachineError
from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.planner.labels import label
from ridgeline.planner.ranking import Candidate, CompilerReading
from ridgeline.planner.request import PlanRequest
from ridgeline.planner.trials.trials import differences
from ridgeline.simulator.compiler.coverage import why_unread
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline

OTHER_PROGRAM = frozenset(
    {"form", "precision", "memory_format", "random", "workers", "threads", "accumulate"}
)
"""Plans that differ in one of these have other programs."""
ASSUMED = "assumed: compiling makes "
"""How the note begins that a reading stands in for."""


def read_again(
    request: PlanRequest, candidates: Sequence[Candidate], tried: Candidate
) -> tuple[list[Candidate], list[str]]:
    """The candidates with what was read in the trial of one of them, and what could not be used of it.

    The candidate that was tried has the programs that its trial loaded; none if it compiles nothing.
    """
    measured = tried.measured
    if measured is None:
        return list(candidates), []
    notes = [note for note in measured.notes if note.startswith("what the compiler made could not")]
    reason = why_unread(request.workloads[tried.plan.workers], tried.plan, measured.programs)
    if reason:
        notes.append(f"the kernels of {label(tried.plan)} stay as assumed: {reason}")
    if reason or not measured.programs:
        return list(candidates), notes
    try:
        read = [_read(request, c, tried.plan, measured.programs) for c in candidates]
    except MachineError as error:  # the assumed step has no operator of such a kind
        note = f"the kernels of {label(tried.plan)} stay as assumed: {error}"
        return list(candidates), [*notes, note]
    return read, notes


def as_read(predicted: Timeline, reading: CompilerReading | None) -> Timeline:
    """A prediction whose notes say what the compiler made, where that was read, and not what is assumed."""
    if reading is None:
        return predicted
    line = f"read: {reading.text}"
    notes = (line if note.startswith(ASSUMED) else note for note in predicted.notes)
    return msgspec.structs.replace(predicted, notes=tuple(dict.fromkeys(notes)))


def _read(
    request: PlanRequest, candidate: Candidate, tried: Plan, programs: tuple[CompilerProgram, ...]
) -> Candidate:
    different = differences(candidate.plan, tried)
    if all(MODES[plan.execution].is_one_program for plan in (candidate.plan, tried)):
        different -= {"form"}  # the same program, called from Python or packaged
    is_told = candidate.reading is not None and "kernels" in different
    if is_told or not different.isdisjoint(OTHER_PROGRAM):
        return candidate
    workload = request.workloads[candidate.plan.workers]
    again = simulate(request.machine, workload, candidate.plan, details=False, programs=programs)
    before = candidate.timeline
    reading = CompilerReading(
        kernels=round(again.counters["own_kernels"]),
        num_bytes=round(again.counters["own_bytes"]),
        step_s=again.step_ns * 1e-9,
        assumed_kernels=round(before.counters["own_kernels"]),
        assumed_bytes=round(before.counters["own_bytes"]),
        assumed_s=before.step_ns * 1e-9,
    )
    return msgspec.structs.replace(candidate, reading=reading, timeline=as_read(before, reading))
