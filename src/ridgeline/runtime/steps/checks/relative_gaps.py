"""How far tensors are apart, each in units of its own change; many at once, to wait once."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.tensors.copies import at_once

RESOLUTION = 1e-6
"""Of a tensor's norm: changes below that are as small as the rounding of single precision."""


class Compared(NamedTuple):
    """A tensor before a step, and after it in two ways.

    `mask` are elements to leave out, `num_masked` of them, and as many others that are furthest apart.
    """

    before: Tensor
    wanted: Tensor
    got: Tensor
    mask: Tensor | None = None
    num_masked: int = 0


def relative_gaps(compared: Sequence[Compared]) -> list[float]:
    """For each the norm of the gap over that of the change; infinite for other shapes, NaN where one is.

    Cost: Waits once for each device, and for each mask. The memory of all tensors, once more.
    """
    found = [0.0] * len(compared)
    norms: dict[int, Tensor] = {}
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for index, one in enumerate(compared):
        if not one.before.shape == one.wanted.shape == one.got.shape:
            # Of another shape than before, there is no change to measure a gap by: equal or not is all.
            is_same = one.wanted.shape == one.got.shape and torch.equal(one.wanted, one.got)
            found[index] = 0.0 if is_same else math.inf
        elif one.num_masked or not _is_plain(one):
            norms[index] = _norms(one)
        else:
            alike[one.wanted.device, one.wanted.dtype].append(index)
    for indices in alike.values():
        norms |= zip(indices, _norms_of_all([compared[i] for i in indices]), strict=True)
    for index, (distance, change, whole) in at_once(norms).items():
        # A parameter that hardly moved would show the rounding of its last bit as a large relative gap.
        size = max(change, RESOLUTION * whole)
        found[index] = distance / size if size else distance
    return found


def alignment(one: Compared) -> float:
    """How much of a gap lies along the change, from 0 to 1; 1 where that is not known.

    A factor that is wrong gives 1. What rounding moves, it moves to either side.

    Cost: Waits for the device.
    """
    if not one.before.shape == one.wanted.shape == one.got.shape:
        return 1.0
    # Differences of numbers that nearly agree: what float32 rounds off would be most of the angle.
    wide = torch.complex128 if one.wanted.is_complex() else torch.float64
    wanted = one.wanted.to(wide).flatten()
    gap, change = (wanted - other.to(wide).flatten() for other in (one.got, one.before))
    if one.mask is not None and one.num_masked:
        mask = one.mask.flatten()
        gap, change = gap.masked_fill(mask, 0.0), change.masked_fill(mask, 0.0)
        gap[_furthest(one, gap.abs())] = 0.0
    size = float(gap.norm() * change.norm())
    along = float(torch.vdot(gap, change).abs())
    return along / size if 0.0 < size < math.inf else 1.0


def counts(masks: Sequence[Tensor]) -> list[int]:
    """The elements of each mask that are set."""
    sums = at_once({index: mask.sum().view(1) for index, mask in enumerate(masks)})
    return [int(sums[index][0]) for index in range(len(masks))]


def _is_plain(one: Compared) -> bool:
    """Whether torch subtracts, and takes the norm of, many such tensors at once."""
    tensors = (one.before, one.wanted, one.got)
    return one.wanted.is_floating_point() and len({(t.dtype, t.device) for t in tensors}) == 1


def _norms_of_all(compared: Sequence[Compared]) -> list[Tensor]:
    before, wanted, got = ([getattr(c, name) for c in compared] for name in Compared._fields[:3])
    # One kernel for hundreds of parameters: one by one, launching would take longer than the arithmetic.
    gaps, changes = (torch._foreach_sub(wanted, other) for other in (got, before))  # noqa: SLF001
    norms = torch._foreach_norm  # noqa: SLF001 - optimizers of torch use these, too
    # In 64 bits: single precision cannot sum up many squares to within `RESOLUTION`.
    found = [norms(tensors, 2, dtype=torch.float64) for tensors in (gaps, changes, wanted)]
    return [torch.stack(three) for three in zip(*found, strict=True)]


def _norms(one: Compared) -> Tensor:
    # `abs` before `double`, which would drop the imaginary part of complex numbers.
    gap, change = ((one.wanted - other).abs().double().flatten() for other in (one.got, one.before))
    if one.mask is not None and one.num_masked:
        mask = one.mask.flatten()
        gap, change = gap.masked_fill(mask, 0.0), change.masked_fill(mask, 0.0)
        gap[_furthest(one, gap)] = 0.0
    return torch.stack([gap.norm(), change.norm(), one.wanted.abs().double().norm()])


def _furthest(one: Compared, gap: Tensor) -> Tensor:
    """Places of as many more elements as are masked: those that are furthest apart of the others."""
    return gap.topk(min(one.num_masked, gap.numel() - one.num_masked)).indices
