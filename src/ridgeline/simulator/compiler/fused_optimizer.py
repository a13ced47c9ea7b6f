"""The optimizer as one kernel, in place of its operators."""

from collections.abc import Sequence
from math import prod

from ridgeline.simulator.pricing.costs import Prices
from ridgeline.simulator.pricing.pieces import Piece
from ridgeline.workload import Workload

CHUNK = 65536
"""Elements that one block of threads updates. Source: aten/src/ATen/native/cuda/MultiTensorApply.cuh."""
BLOCK_BYTES_PER_S = 42e9
"""What a block alone reads and writes in a second: a few large parameters leave most of a GPU idle.

Source: measured on an H200 (torch 2.11); Adam on 3.9 million parameters took 43.9 us where the bandwidth
would allow 29, on 12.6 million 94.8 where it would allow 84.
"""


def fused_optimizer(list_: Prices, pieces: Sequence[Piece], workload: Workload) -> Piece:
    """One kernel for the whole optimizer.

    What every operator costs the host at least is its share of the optimizer's loop over parameters, which
    stays; of issuing them, what the largest of them costs.

    `pieces` are the operators of the optimizer, which has a fused form.
    """
    num_bytes = workload.fused_optimizer_bytes
    sizes = [prod(parameter.shape) for parameter in workload.gradients]
    block_bytes = min(CHUNK, max(sizes, default=0)) * num_bytes / max(1, sum(sizes))
    copied_s = max(list_.copy_seconds(num_bytes), block_bytes / BLOCK_BYTES_PER_S)
    # The one kernel moves no more than the operators that it stands for.
    taken_s = min(copied_s, sum(piece.work_s for piece in pieces))
    issued_s = sorted(piece.host_s for piece in pieces)
    return pieces[0]._replace(
        name="fused_optimizer",
        host_s=issued_s[-1] + (len(pieces) - 1) * issued_s[0],
        work_s=taken_s,
        ideal_s=0.0,
        roofline_s=min(list_.least_copy_seconds(num_bytes), taken_s),
        bound="memory",
        source="curve",
        flops=sum(piece.flops for piece in pieces),
        num_bytes=num_bytes,
        has_kernel=True,
        members=tuple(piece.op for piece in pieces),
    )
