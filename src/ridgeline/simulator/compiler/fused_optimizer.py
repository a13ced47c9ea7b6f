"""The optimizer in its fused form, in place of its operators."""

from collections.abc import Iterator, Sequence
from math import prod

from ridgeline.simulator.pricing.costs import Prices
from ridgeline.simulator.pricing.pieces import Piece
from ridgeline.workload import Workload

CHUNK = 65536
"""Elements that one block of threads updates. Source: aten/src/ATen/native/cuda/MultiTensorApply.cuh."""
MOST_TENSORS = {2: 64, 3: 48, 4: 36, 5: 30}
MOST_BLOCKS = 320
"""Parameters and blocks of one launch, the first by the tensors that each of them has. Source: as above."""
BLOCK_BYTES_PER_S = 42e9
"""What a block alone reads and writes in a second: a few large parameters leave most of a GPU idle.

Source: measured on an H200 (torch 2.11); Adam on 3.9 million parameters took 43.9 us where the bandwidth
would allow 29, on 12.6 million 94.8 where it would allow 84, on 512 times 65,536 622 where it would
allow 223.
"""


def fused_optimizer(list_: Prices, pieces: Sequence[Piece], workload: Workload) -> Piece:
    """One piece for the whole optimizer: a kernel that is launched anew for every few dozen parameters.

    What every operator costs the host at least is its share of the optimizer's loop over parameters, which
    stays; of issuing them, what the largest of them costs.

    `pieces` are the operators of the optimizer, which has a fused form.
    """
    num_bytes = workload.fused_optimizer_bytes
    sizes = [prod(parameter.shape) for parameter in workload.gradients]
    each = num_bytes / max(1, sum(sizes))
    copied_s = late_s = 0.0
    for launch in _launches(sizes, _most_tensors(workload)):
        moved_s = list_.copy_seconds(round(each * sum(launch)))
        copied_s += moved_s
        late_s += max(0.0, each * min(CHUNK, max(launch)) / BLOCK_BYTES_PER_S - moved_s)
    # The launches move no more than the operators that they stand for.
    taken_s = min(copied_s, sum(piece.work_s for piece in pieces)) + late_s
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


def _most_tensors(workload: Workload) -> int:
    """Parameters of one launch."""
    elements = sum(prod(parameter.shape) * 4 for parameter in workload.gradients)
    # Gradients are read, and all others read and written.
    tensors = (workload.fused_optimizer_bytes / max(1, elements) + 1) / 2
    return MOST_TENSORS[min(5, max(2, round(tensors)))]


def _launches(sizes: Sequence[int], most_tensors: int) -> Iterator[list[int]]:
    """Elements of the parameters, or parts of them, that each launch updates."""
    held: list[int] = []
    blocks = 0
    for size in filter(None, sizes):
        left = size
        while left:
            part = min(left, (MOST_BLOCKS - blocks) * CHUNK)
            held.append(part)
            left -= part
            blocks += -(-part // CHUNK)
            if blocks == MOST_BLOCKS or len(held) == most_tensors:
                yield held
                held = []
                blocks = 0
    if held:
        yield held
