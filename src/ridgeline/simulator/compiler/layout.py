"""In which memory format torch's compiler runs the convolutions of a step, and what the change costs it.

On a GPU it lays out images with their channels innermost by itself, unless it finds convolutions that are
slower so. What the user lays out so beforehand it leaves, and spares the change.

Source: `GraphLowering.decide_layout_opt` in torch/_inductor/graph.py, for graphs that train.
"""

from collections.abc import Iterator

import msgspec

from ridgeline.simulator.compiler.untranslated import untranslated
from ridgeline.simulator.pricing.dataflow import spec_bytes
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.workload import Op, Workload

_MOST_NODES = 300
"""Operators for each convolution, from which on there are too few convolutions to lay out anything for."""


@kept_by_identity(32)
def lays_out(workload: Workload) -> bool:
    """Whether the compiler changes the memory format of a step's convolutions by itself."""
    convolutions = list(_convolutions(workload))
    nodes = len(workload.parameters) + sum(op.phase == "forward" for op in workload.ops)
    if workload.device != "cuda" or nodes >= _MOST_NODES * len(convolutions):
        return False
    is_left = untranslated(workload)
    # One such convolution is enough: the decision is for the whole graph.
    if any(_is_grouped(op) or _narrows(op) or is_left(op) for op in convolutions):
        return False
    return not all(max(op.inputs[1].shape[:2]) <= 64 for op in convolutions)


def conversion_bytes(workload: Workload) -> int:
    """Bytes that move where the compiler changes the format of images, weights and weights' gradients."""
    weights = sum(spec_bytes(op.inputs[1]) for op in _convolutions(workload))
    images = sum(spec_bytes(spec) for spec in workload.batch if len(spec.shape) == 4)
    # Each is read and written; of weights the gradient as well.
    return 2 * images + 4 * weights


def _convolutions(workload: Workload) -> Iterator[Op]:
    return (
        op for op in workload.ops if op.phase == "forward" and op.name == "aten.convolution.default"
    )


def _is_grouped(op: Op) -> bool:
    """Whether there are groups of more than one channel; depthwise convolutions like channels innermost."""
    groups = msgspec.json.decode(op.arguments)["args"][-1]
    return groups > 1 and op.inputs[1].shape[1] > 1


def _narrows(op: Op) -> bool:
    """Whether the result has at most half as many channels as the image, from a kernel larger than 1 x 1."""
    given, taken, *window = op.inputs[1].shape
    return 2 * given <= taken and window[0] > 1
