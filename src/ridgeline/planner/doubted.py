"""Whether a profile is to be measured again at a start: measured beside load, or contradicted by far.

`staleness` has a profile measured again in the midst of a choice, where it is old. These profiles may be
young: what is wrong with them is known, and a host that is quiet now will give other numbers. So that not
every start measures, how often that was done already is counted in the profile.
"""

from ridgeline import units
from ridgeline.machine import Machine, Quantity
from ridgeline.planner.exchanges.exchanges import exchange_changes
from ridgeline.planner.ranking import Candidate, Ranking

FAR = 0.5
"""A prediction that is off by this share of what was measured, too much or too little, was made from
something else than the machine as it is."""
MOST_RETAKES = 3
"""A host that is never quiet, or whose group is always throttled, is as its profile says."""


def why_again(machine: Machine) -> str:
    """Why a profile is to be measured again where the host is quiet now; empty where it is not."""
    # A suspicion is followed once: where a new profile is contradicted alike, the model is wrong.
    if machine.suspect and machine.retakes == 0:
        return machine.suspect
    if (
        machine.host_load is not None
        and machine.host_load.is_disturbed
        and machine.retakes < MOST_RETAKES
    ):
        return f"the profile was measured while {machine.host_load}"
    return ""


def said(machine: Machine) -> tuple[str, ...]:
    """What a user of this profile should know about it, a line each."""
    lines = []
    if machine.host_load is not None and machine.host_load.is_disturbed:
        lines.append(
            f"the profile was measured while {machine.host_load}: what is predicted from it may be far off"
        )
    if machine.suspect:
        lines.append(machine.suspect)
    return tuple(lines)


def suspicion(machine: Machine, ranking: Ranking) -> str:
    """How trials of plain plans contradict a profile by far, all in one direction; empty where they do not.

    Other plans may be off by what is thought of compilers and captures; see `Machine.suspect`. Nothing is
    said where rates are assumed: those were never measured, and a note says so already.
    """
    if any(rate.source == "assumed" for rate in _rates(machine)):
        return ""
    plain = [each for each in ranking.candidates if each.measured is not None and _is_plain(each)]
    errors = [_error(each) for each in plain]
    # All in one direction: errors on both sides are the model's, not the machine's state.
    if not errors or (max(errors) > -FAR and min(errors) < FAR):
        return ""
    worst = max(plain, key=lambda each: abs(_error(each)))
    measured_ns = worst.measured.step_ns if worst.measured is not None else 0
    return (
        f"the profile measured at {machine.measured_at} predicted "
        f"{units.nanoseconds(worst.timeline.step_ns)} for a plain step whose trial took "
        f"{units.nanoseconds(measured_ns)}"
    )


def _rates(machine: Machine) -> tuple[Quantity, ...]:
    """What operators are priced by where they were not timed, and what each of them costs the host."""
    return (
        *(ceiling.rate for ceiling in machine.ceilings),
        *(cost.seconds for cost in machine.dispatch),
    )


def _error(candidate: Candidate) -> float:
    """By how much of the measured step the prediction exceeds it."""
    measured = candidate.measured
    if measured is None or not measured.step_ns:
        return 0.0
    # By the first prediction, before trials of relatives corrected it.
    return candidate.timeline.step_ns / measured.step_ns - 1.0


def _is_plain(candidate: Candidate) -> bool:
    """Whether a plan runs the operators that were timed, as a script would: eager, gradients all-reduced."""
    plan = candidate.plan
    is_as_written = plan.precision == "as-is" and plan.memory_format == "as-is"
    return plan.execution == "eager" and is_as_written and not exchange_changes(plan)
