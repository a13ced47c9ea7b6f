"""Other batches of the same kind, for checks that run a step on more than one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def perturb_inputs(
    inputs: Sequence[Tensor], originals: Sequence[Tensor], shift: int, *, keeps_whole: bool = False
) -> None:
    """Other values of the same kind: rows are repeated in place of others, and numbers made smaller.

    Shift 0 puts the original ones back.
    Whole numbers may be indices, offsets, lengths, classes of a column: each value stays in its column, rows
    stay beside those of other tensors, and what was in order stays so and begins with what it began with.
    Numbers that are probabilities stay below 1. With `keeps_whole`, whole numbers stay as they are.
    """
    for tensor, original in zip(inputs, originals, strict=True):
        changed = original
        # Of a sparse tensor no entries are repeated.
        sizes = original.shape if original.layout is torch.strided else ()
        dim = next((d for d, size in enumerate(sizes) if size > 1), None)
        if dim is not None and not (keeps_whole and is_whole(original)):
            rows = torch.arange(original.shape[dim], device=original.device)
            # Each row stands for the next few as well, so that what was in ascending order still is.
            changed = original.index_select(dim, rows - rows % (shift + 1))
        if original.is_floating_point():
            changed = changed * (1.0 - 0.25 * shift)
        tensor.detach().copy_(changed)


def is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is of whole numbers, or of truth values."""
    return not (tensor.is_floating_point() or tensor.is_complex())
