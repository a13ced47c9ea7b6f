"""What calling a compiled program costs the host."""

from typing import NamedTuple

from ridgeline.execution import Form
from ridgeline.workload import Phase, Workload


class CallCost(NamedTuple):
    """Host cost of a compiled program in dispatches of a forward operator: a call, and each kernel in it."""

    call: float
    kernel: float


CALLS: dict[Form, dict[Phase, CallCost]] = {
    "compiled": {"forward": CallCost(20, 1.5), "backward": CallCost(8, 0.9)},
    "regional": {"forward": CallCost(20, 1.5), "backward": CallCost(8, 0.9)},
    "step-graph": {
        "forward": CallCost(10, 0.6),
        "backward": CallCost(0, 0.6),
        "optimizer": CallCost(0, 0.6),
    },
    "packaged": {
        "forward": CallCost(6, 0.3),
        "backward": CallCost(0, 0.3),
        "optimizer": CallCost(0, 0.3),
    },
}
"""Guards and autograd's wrappers make a compiled forward dearer than what it replaces where steps are small.

Source: assumed from chains of 4 and 16 linear layers of width 8 (torch 2.13, one CPU thread): a compiled
forward takes 0.18 ms more than an eager one at 8 us a dispatch and 13 us per kernel, a backward 7 us per
kernel. Whole steps of a small MLP, about 20 kernels: 0.21 and 0.39 ms as one program, 0.07 ms as a package.
"""


PARAMETER_DISPATCHES = 0.4
GRADIENT_DISPATCHES = 0.7
"""What each parameter adds to the call of a compiled forward pass on a GPU, and its gradient to backward:
guards and wrappers look at the one, autograd hands out the other.

Source: measured, a conformer of 250 parameters on an H200 (torch 2.11): 1.6 and 2.1 ms at 12 us a dispatch.
"""


def handing(phase: Phase, workload: Workload) -> float:
    """Dispatches that handing a program its parameters takes, or autograd the gradients."""
    if phase == "forward":
        return PARAMETER_DISPATCHES * len(workload.parameters)
    return GRADIENT_DISPATCHES * len(workload.ready_order) if phase == "backward" else 0.0


def assumed_calls(form: Form) -> str:
    """What is assumed of it, as a note of predictions."""
    forward = CALLS[form]["forward"]
    return (
        f"assumed: calling a compiled program costs the host {forward.call:g} dispatches, and each kernel in "
        f"it {forward.kernel:g}"
    )
