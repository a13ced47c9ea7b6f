"""What torch's compiler writes out for a library that eager torch hands a view.

A loop's result exists once somebody asks for it. Where attention takes parts of such a result (query, key and
value out of one packed projection), the compiler computes and stores each part by itself, besides the whole.
"""

from collections.abc import Callable

from ridgeline.simulator.pricing.dataflow import data_flow, spec_bytes
from ridgeline.workload import Op, Workload


def copied_bytes(workload: Workload, index: int, is_loop: Callable[[Op], bool]) -> int:
    """Bytes read and written to store the parts that an attention operator takes of loops' results.

    `is_loop` says whether the compiler writes an operator as a loop of its own. Only attention of the forward
    pass needs anything.

    Source: `sdpa_constraint` in torch/_inductor/lowering.py; kernels that torch 2.11 writes for the encoder
        layers of torch: three copies before each attention, none where a library has made what is split.
    """
    op = workload.ops[index]
    if op.family != "attention" or op.phase != "forward":
        return 0
    found = 0
    for spec, source in zip(op.inputs, data_flow(workload).sources[index], strict=True):
        if source is None:
            continue
        maker = workload.ops[source[0]]
        is_part = spec_bytes(spec) < spec_bytes(maker.outputs[source[1]])
        if is_part and is_loop(maker):
            found += 2 * spec_bytes(spec)
    return found
