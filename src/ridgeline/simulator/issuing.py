"""When the host has issued each operator of a step to a GPU, and where it waits for values before."""

from typing import NamedTuple

from ridgeline.simulator.model import StepModel
from ridgeline.simulator.pricing.pieces import issued

SETTLING_STEPS = 4
"""Steps until each takes as long as the one before: the host then begins as far ahead as it ever will."""


class Issue(NamedTuple):
    """What the host does in one step of the steady state, in seconds from when it begins with it.

    `at_s` has for each frame when each of its pieces had been issued.
    """

    at_s: dict[str, list[float]]
    step_s: float


def issue_step(model: StepModel) -> Issue:
    """Issue the step again and again, as a training loop does.

    Collectives are left out: they have a lane of their own.
    """
    host_s = device_s = 0.0
    issue = Issue({}, 0.0)
    # Without waits the host never looks at the device, and the first step is as all others.
    waits = any(piece.waits for held in model.pieces.values() for piece in held)
    for _ in range(SETTLING_STEPS if waits else 1):
        begin_s, at_s = host_s, dict[str, list[float]]()
        for frame in model.frames:
            held = model.pieces.get(frame.name, ())
            times_s, host_s, device_s = issued(held, host_s, device_s)
            at_s[frame.name] = [time_s - begin_s for time_s in times_s]
        issue = Issue(at_s, host_s - begin_s)
    return issue
