"""What calling a compiled program costs the host."""

from typing import NamedTuple

from ridgeline.execution import Form
from ridgeline.workload import Phase


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


def assumed_calls(form: Form) -> str:
    """What is assumed of it, as a note of predictions."""
    forward = CALLS[form]["forward"]
    return (
        f"assumed: calling a compiled program costs the host {forward.call:g} dispatches, and each kernel in "
        f"it {forward.kernel:g}"
    )
