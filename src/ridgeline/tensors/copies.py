"""Copying tensors to where a replayed graph reads them, and many numbers to the host at once."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

MOST_COPIES = 4
"""Tensors that are copied one by one: together they cost the host less, but one kernel for many leaves most
of a GPU idle. Source: measured, 1.6 MB in 16 us on an H200, a fifteenth of its bandwidth."""
MOST_BYTES_AT_ONCE = 1 << 16
"""At a fifteenth of the bandwidth these take less than 1 us."""
_AS_THEY_ARE = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
)
"""Types whose kernels copy any bits: those of narrower numbers compute in float32, and a bool is 0 or 1."""


def copy_into(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write each source into its target, on the current stream; shapes are equal."""
    if len(targets) > MOST_COPIES:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def copier(
    targets: Sequence[Tensor], examples: Sequence[Tensor] = ()
) -> Callable[[Sequence[Tensor]], object]:
    """What writes sources into these targets, as `copy_into`; how is decided here, once.

    Tensors of little are copied in one call, since there a kernel for each of them takes no less time.

    Args:
        targets: In dense memory.
        examples: Where all sources will lie in memory as these do: on a GPU one kernel then copies several
            types. Beside an H200 it takes 9 us for two tensors of two types, and a copy of each 12; each
            tensor that has to be viewed as another type takes 0.5 us more on a CPU.
    """
    held = [*targets]
    if len(held) == 1:
        return partial(_copy_one, held[0])
    size = sum(target.nbytes for target in held)
    if len(held) > MOST_COPIES or (held and size <= MOST_BYTES_AT_ONCE):
        kind = common_type([*held, *examples]) if examples and held[0].is_cuda else None
        if kind is not None:
            return copier_as(kind, held)
        copy: Callable[..., object] = torch._foreach_copy_
        return partial(copy, held)
    return partial(copy_into, held)


def common_type(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The type as whose elements all can be copied bit by bit; None where none is, or they are of one."""
    kind = min((tensor.dtype for tensor in tensors), key=lambda dtype: dtype.itemsize)
    others = [tensor for tensor in tensors if tensor.dtype != kind]
    if not others or kind not in _AS_THEY_ARE:
        return None
    is_viewed = all(t.dim() and t.stride(-1) == 1 and not t.requires_grad for t in others)
    return kind if is_viewed else None


def copier_as(kind: torch.dtype, targets: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], object]:
    """What writes sources into these targets as elements of one type; see `common_type`."""
    held = [target.view(kind) for target in targets]
    places = [place for place, target in enumerate(targets) if target.dtype != kind]

    def copy(sources: Sequence[Tensor]) -> None:
        viewed = [*sources]
        for place in places:
            viewed[place] = viewed[place].view(kind)
        torch._foreach_copy_(held, viewed)

    return copy


def _copy_one(target: Tensor, sources: Sequence[Tensor]) -> None:
    target.copy_(sources[0])


def strided_copy(tensor: Tensor) -> Tensor:
    """A tensor of the same values and strides without gradients; a dense one where elements share memory."""
    copy = tensor.detach().clone()
    # `clone` keeps strides of dense tensors only; one with gaps comes back without them.
    if tensor.layout != torch.strided or copy.stride() == tensor.stride() or overlaps(tensor):
        return copy
    laid_out = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return laid_out.copy_(copy)


def overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory, as in an expanded or unfolded tensor."""
    return lie_on_each_other(tensor.shape, tensor.stride())


def lie_on_each_other(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether different elements of a tensor so laid out share memory."""
    extent = 1
    # From the innermost dimension out: each must step over all that lies within it.
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent += (size - 1) * stride
    return False


def is_noted(tensor: Tensor) -> bool:
    """Whether the sign or conjugation of its elements is only noted, as in `x.conj()` and `x.conj().imag`.

    torch's operators look at the note; compiled code takes elements as they are written.
    """
    return tensor.is_neg() or tensor.is_conj()


def written(tensor: Tensor) -> Tensor:
    """The tensor itself, or one whose elements are written as they count."""
    return tensor.resolve_conj().resolve_neg()


def repeats(values: Sequence[Any]) -> list[int]:
    """For each value where it stands first: code may ask whether two tensors are one."""
    first: dict[int, int] = {}
    return [first.setdefault(id(value), place) for place, value in enumerate(values)]


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies without gradients, of one that stands there several times one."""
    made = {id(tensor): tensor for tensor in tensors}
    made = {key: tensor.detach().clone() for key, tensor in made.items()}
    return [made[id(tensor)] for tensor in tensors]


def own_copies(values: Sequence[Any]) -> list[Any]:
    """`own_copy` of each tensor, of one that stands there several times one; what is no tensor as it is."""
    made = {id(value): own_copy(value) for value in values if isinstance(value, Tensor)}
    return [made.get(id(value), value) for value in values]


def own_copy(tensor: Tensor) -> Tensor:
    """A tensor of the same values in dense memory of its own; it requires gradients if that one does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def num_writes(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written in place, by itself or by a view of it."""
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - torch has no other count


def at_once(values: dict[int, Tensor]) -> dict[int, list[float]]:
    """Numbers of small tensors of one shape, all of a device in one copy.

    Cost: Waits once for each device.
    """
    places: dict[torch.device, list[int]] = defaultdict(list)
    for index, tensor in values.items():
        places[tensor.device].append(index)
    return {
        index: row
        for indices in places.values()
        for index, row in zip(
            indices, torch.stack([values[i] for i in indices]).tolist(), strict=True
        )
    }


def real_parts(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones: where one part is NaN, the other is compared all the same."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
