"""When the host has issued each operator of a step to a GPU, and where it waits for values before."""

from typing import NamedTuple

from ridgeline.simulator.model import StepModel

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

    An operator that hands values to the host is issued when the device has done all that came before; what it
    waits for by itself is in its host time, which was measured. Collectives are left out: they have a lane of
    their own.
    """
    host_s = device_s = 0.0
    issue = Issue({}, 0.0)
    # Without waits the host never looks at the device, and the first step is as all others.
    for _ in range(SETTLING_STEPS if _waits(model) else 1):
        begin_s, at_s = host_s, dict[str, list[float]]()
        for frame in model.frames:
            issued: list[float] = []
            for piece in model.pieces.get(frame.name, ()):
                if piece.waits:
                    host_s = max(host_s, device_s)
                host_s += piece.host_s
                issued.append(host_s - begin_s)
                if piece.has_kernel:
                    device_s = max(device_s, host_s) + piece.lane_s
            at_s[frame.name] = issued
        issue = Issue(at_s, host_s - begin_s)
    return issue


def _waits(model: StepModel) -> bool:
    return any(piece.waits for held in model.pieces.values() for piece in held)
