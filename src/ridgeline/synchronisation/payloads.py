"""Bytes of encoded payloads, and the numbers that codecs and predictions must agree on.

Codecs call these when they encode, and the tables when they predict, so that both agree by construction.
"""

import math
from collections.abc import Sequence

from ridgeline.synchronisation.entries import Options, Shape, WireBytes

SCALE_BYTES = 4
"""One float32 scale beside the elements that it scales."""
INDEX_BYTES = 4
VALUE_BYTES = 4
"""Position and float32 value of an element that is sent by itself."""
_PART_ELEMENTS, _PART_BYTES = 16, 64
"""To whose multiples parts of an update begin, see `update_shard_elements`."""


def share_elements(num_elements: int, workers: int, block: int = 1) -> int:
    """Elements of each of the equal shares into which a payload is scattered.

    A block has one scale; shares that are larger are whole blocks.
    """
    share = -(-num_elements // workers)
    # A block that lies in two shares would need its scale in both.
    return -(-share // block) * block if share > block else share


def update_shard_elements(num_elements: int, element_bytes: int, workers: int) -> int:
    """Elements of each of the equal parts of a bucket, one a worker; the last one is filled up.

    Parts begin where vectors of an operator on the whole bucket do, so that an update of a part rounds as an
    update of all does: at multiples of 64 bytes, and of 16 elements.
    """
    step = max(_PART_ELEMENTS, _PART_BYTES // element_bytes)
    return -(-num_elements // (workers * step)) * step


def unchanged(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
    """The payload of what encodes nothing."""
    return num_elements * element_bytes


def scattered(num_bytes: int, *, in_blocks: bool) -> WireBytes:
    """The payload of codecs that keep every element and send each worker its share.

    Args:
        num_bytes: Of an encoded element.
        in_blocks: Whether each block of the option `block` has a scale beside it.
    """

    def wire_bytes(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
        block = int(options["block"]) if in_blocks else 1
        # Filled up share by share, so padding and scales count once for each of them.
        share = share_elements(num_elements, workers, block)
        num_scales = -(-share // block) if in_blocks else 0
        return workers * (share * num_bytes + num_scales * SCALE_BYTES)

    return wire_bytes


def kept_elements(num_elements: int, density: float) -> int:
    """How many of the largest elements are sent: at least one of any."""
    return min(num_elements, max(1, math.ceil(density * num_elements)))


def largest(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
    """The largest elements, and where they stand.

    Source: Lin et al., "Deep gradient compression", ICLR 2018.
    """
    kept = kept_elements(num_elements, float(options["density"]))
    return kept * (VALUE_BYTES + INDEX_BYTES)


def factor_rank(shape: Shape, rank: int) -> int:
    """The rank in which a gradient of this shape is sent as two factors; 0 where that saves nothing.

    Its first dimension are the rows, the others the columns.
    """
    if len(shape) < 2:
        return 0
    rows, columns = shape[0], math.prod(shape[1:])
    rank = min(rank, rows, columns)
    # Strictly less: with as many bytes the products would be for nothing.
    return rank if (rows + columns) * rank < rows * columns else 0


def factors(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
    """Two factors of a matrix, taken to be square, and never more than the matrix.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019: rank (rows + columns) elements.
    """
    # In whole numbers, since the root of a large float may be one too small.
    side = math.isqrt(max(0, num_elements - 1)) + 1 if num_elements else 0
    return min(2 * side * int(options["rank"]), num_elements) * VALUE_BYTES


def factors_of_shapes(shapes: Sequence[Shape], num_elements: int, options: Options) -> int:
    """Two factors of every gradient that they are smaller than, and the others as they are."""
    return VALUE_BYTES * sum(_sent_in_factors(shape, int(options["rank"])) for shape in shapes)


def _sent_in_factors(shape: Shape, rank: int) -> int:
    rank = factor_rank(shape, rank)
    return rank * (shape[0] + math.prod(shape[1:])) if rank else math.prod(shape)


def signs(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
    """A bit an element and a scale a block, as for the bucket of one parameter.

    Source: Karimireddy et al., ICML 2019 (signs with the mean magnitude as a scale).
    """
    return signs_of_shapes([(num_elements,)], num_elements, options)


def signs_of_shapes(shapes: Sequence[Shape], num_elements: int, options: Options) -> int:
    """A bit an element, alignment included, and a scale for every block of each parameter."""
    block = int(options["block"])
    num_scales = sum(-(-math.prod(shape) // block) for shape in shapes)
    return -(-num_elements // 8) + SCALE_BYTES * num_scales
