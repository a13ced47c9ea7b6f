"""Whether the machine was as fast during the run as when the plan was tried.

A trial and the run execute the same plan on the same machine. What they differ by is no error of the
model: the machine itself was slower or faster meanwhile (other programs, throttling, neighbours on a
shared host). The verdict says so, instead of leaving the reader to guess. Nor is it the model's error when
the profile was measured in another hour than this one: then trial and run agree, and both differ from it.
"""

import msgspec

from ridgeline import units
from ridgeline.timeline import Timeline

NOTABLE = 0.1
"""Differences below this are the ordinary spread of steps on a quiet machine."""


FAR = 1.5
"""A factor by which the model alone is never off on a machine that its profile describes."""


def with_stale_profile(measured: Timeline, trial: Timeline | None, predicted: Timeline) -> Timeline:
    """The measured timeline, with a note when trial and run both say that the profile is not of now."""
    if trial is None or not (trial.step_ns and measured.step_ns):
        return measured
    ratios = [predicted.step_ns / step_ns for step_ns in (trial.step_ns, measured.step_ns)]
    # Both, and to the same side: a single measurement may have been disturbed.
    if not (min(ratios) > FAR or max(ratios) < 1.0 / FAR):
        return measured
    note = (
        f"trial ({units.nanoseconds(trial.step_ns)}) and run ({units.nanoseconds(measured.step_ns)}) agree "
        f"that the saved profile ({units.nanoseconds(predicted.step_ns)} predicted) does not describe this "
        "machine as it is now: measure again with ridgeline measure --refresh"
    )
    return msgspec.structs.replace(measured, notes=(note, *measured.notes))


def with_drift(measured: Timeline, trial: Timeline | None) -> Timeline:
    """The measured timeline, with a note when its step differs notably from that of the trial."""
    if trial is None or not trial.step_ns:
        return measured
    ratio = measured.step_ns / trial.step_ns
    if abs(ratio - 1.0) <= NOTABLE:
        return measured
    pace = "slower" if ratio > 1.0 else "faster"
    note = (
        f"the machine was {pace} during the run than when the plan was tried: "
        f"{units.nanoseconds(measured.step_ns)} a step against {units.nanoseconds(trial.step_ns)} for the "
        "same plan"
    )
    return msgspec.structs.replace(measured, notes=(*measured.notes, note))
