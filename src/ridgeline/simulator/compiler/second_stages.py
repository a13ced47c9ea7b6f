"""Small kernels that end reductions: on a GPU a long sum is taken in parts, which a second kernel adds up.

Each takes as long as the smallest kernel there is, and a network has hundreds of them: for the gradients of
biases and of weights of normalisations, and for every normalisation's statistics across samples.
"""

from collections.abc import Mapping

from ridgeline.simulator.pricing.dataflow import operator_name, spec_elements
from ridgeline.workload import Op

BUSY = 4096
"""Results from which on a reduction keeps the GPU busy as it is. Source: `reduction_split_factor` in
torch/_inductor/choices.py: 32 for each of some 130 multiprocessors."""
LEAST_REDUCED = 1024
"""Elements for each result below which a sum is not taken in parts. Source: as `BUSY`."""
_STAGES: Mapping[str, int] = {
    "native_batch_norm": 3,
    "cudnn_batch_norm": 3,
    "native_batch_norm_backward": 3,
    "cudnn_batch_norm_backward": 3,
    "native_group_norm": 1,
    "native_group_norm_backward": 2,
    "native_layer_norm_backward": 2,
}
"""Of normalisations, those of running statistics included.

Source: kernels that torch 2.11 writes for ResNet-50 (53 batch norms; 145 small kernels in forward, 164 in
backward) and ViT-B/16.
"""


def second_stages(op: Op) -> int:
    """How many small kernels follow the one of the compiler's that an operator is part of."""
    name = operator_name(op)
    if name in _STAGES:
        return _STAGES[name]
    if op.family != "reduction" or "pool" in name or not op.outputs or not op.inputs:
        return 0
    results = max(map(spec_elements, op.outputs))
    reduced = spec_elements(op.inputs[0]) // max(1, results)
    return int(results < BUSY and reduced >= LEAST_REDUCED)
