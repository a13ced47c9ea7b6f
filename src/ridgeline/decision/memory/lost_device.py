"""Plans whose trial cost the process its GPU: the next start of the same step does without them.

A program that reads where it may not leaves the device unusable until the process ends, so nothing else can
be tried in it, nor trained. What the step does as it was written is the user's affair, and not remembered.
"""

from pathlib import Path
from typing import ClassVar

from ridgeline.capture.capturing import lost_device
from ridgeline.codec import Noun
from ridgeline.errors import DeviceLostError, FileFormatError, PlanError, first_line
from ridgeline.plan import Plan
from ridgeline.planner.labels import label

Place = tuple[Path, str]
"""The directory of what is remembered, and the key of the step."""


class LostDevices(Noun, frozen=True, kw_only=True):
    """Plans of one step in whose trials a device was lost, and how."""

    kind: ClassVar[str] = "lost-devices"

    plans: dict[str, str] = {}


def refuse_if_lost(place: Place | None, plan: Plan) -> None:
    """Raise a PlanError, which names the file, for a plan in whose trial an earlier start lost the device."""
    if place is None:
        return
    how = _load(place).plans.get(label(plan))
    if how is not None:
        raise PlanError(
            f"wanted a plan that leaves the device usable, got {label(plan)}, in whose trial an earlier "
            f"start lost it: {how}; remove {_path(place)} to have it tried again"
        )


def raise_if_lost(place: Place | None, plan: Plan, error: Exception) -> None:
    """Remember a plan whose trial cost this process its device, and raise a DeviceLostError.

    Without a place nothing is remembered.

    Cost: Waits for the device.
    """
    # Asked of the device, as errors of torch that follow a lost one have many forms.
    lost = lost_device()
    if lost is not None:
        how = first_line(error, type(error).__name__)
        way_out = "start the process again with plan=rl.Plan()"
        if place is not None:
            # By label, which a person who reads the file can tell.
            plans = {**_load(place).plans, label(plan): how}
            try:
                LostDevices(plans=plans).save(_path(place))
                way_out = "start the process again, which will leave out that plan"
            except OSError as unkept:
                way_out += f" (it could not be remembered: {unkept.strerror})"
        raise DeviceLostError(
            f"wanted a GPU that still works after a trial of {label(plan)}, got {how}; {way_out}",
            how,
        ) from lost


def _load(place: Place) -> LostDevices:
    try:
        return LostDevices.load(_path(place))
    except (FileFormatError, OSError):
        return LostDevices()


def _path(place: Place) -> Path:
    directory, key = place
    return directory / f"lost-{key}.json"
