"""Whether tensors have elements in common: what is written into one is then read in another.

Code that reads the second one behind that write sees it. A program takes each of its inputs for memory of its
own, and computes with what was there before.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

memory_of = Tensor.untyped_storage
address_of = torch.UntypedStorage.data_ptr
"""Where the memory of a tensor begins that has some; both in C, for what is asked in each step."""


class _Span(NamedTuple):
    """From the address of a tensor's first element to behind its last one."""

    begin: int
    end: int
    number: int


def sharing(written: Sequence[Tensor], read: Sequence[Tensor] = ()) -> tuple[int, int] | None:
    """Numbers of two tensors that share an element, of which one is written, if there are any.

    Args:
        written: Numbered first.
        read: Numbered behind these; they may share memory among themselves.

    Cost: About 1.5 us a tensor. A byte for each element, where tensors lie between each other's rows.
    """
    tensors = [*written, *read]
    spans = sorted(
        _Span(t.data_ptr(), t.data_ptr() + _extent(t), number)
        for number, t in enumerate(tensors)
        if has_memory(t) and t.numel()
    )
    # Sorted by address, where only neighbours can meet: pairs of all would be millions for large models.
    neighbours, furthest = list[_Span](), 0
    for span in spans:
        if span.begin >= furthest:
            neighbours.clear()
        neighbours.append(span)
        furthest = max(furthest, span.end)
        if len(neighbours) > 1 and (pair := _meeting(neighbours, tensors, len(written))):
            return pair
    return None


class WrittenMemory:
    """The memory of tensors that a program writes.

    Args:
        tensors: Any that have memory.

    Attributes:
        places: Where it begins.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.places = frozenset(map(_place, tensors)) - {None}

    def __bool__(self) -> bool:
        return bool(self.places)

    def meets(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these may share elements with them.

        Cost: 0.5 us a tensor.
        """
        return not self.places.isdisjoint(map(_place, tensors))


def may_be_shared(value: object) -> torch.UntypedStorage | None:
    """The memory of a tensor, where other tensors or arrays of NumPy lie in it, too; else None."""
    if not isinstance(value, Tensor) or not has_memory(value):
        return None
    memory = value.untyped_storage()
    return memory if num_owners(memory) > 1 else None


def num_owners(memory: torch.UntypedStorage) -> int:
    """How many tensors and arrays of NumPy lie in some memory."""
    # But for this object.
    return torch._C._storage_Use_Count(memory._cdata) - 1  # noqa: SLF001 - as torch's own graph trees ask


def _place(tensor: Tensor) -> int | None:
    """Where the memory begins in which a tensor lies, if it has some."""
    return tensor.untyped_storage().data_ptr() or None if has_memory(tensor) else None


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has an address: not one that wraps other tensors, a sparse one, or one on `meta`."""
    if type(tensor) not in (Parameter, Tensor) and is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_meta


def _meeting(
    neighbours: Sequence[_Span], tensors: Sequence[Tensor], num_written: int
) -> tuple[int, int] | None:
    """The last of some tensors, and an earlier one that shares an element with it, one of them written."""
    last = neighbours[-1]
    others = [span for span in neighbours[:-1] if span.end > last.begin]
    if last.number >= num_written:
        others = [span for span in others if span.number < num_written]
    for other in others:
        if _meet(other, last, tensors):
            return min(other.number, last.number), max(other.number, last.number)
    return None


def _meet(one: _Span, other: _Span, tensors: Sequence[Tensor]) -> bool:
    """Whether two tensors whose spans meet share an element: columns of one matrix need not."""
    pair = [(span.begin, tensors[span.number]) for span in (one, other)]
    if all(tensor.is_contiguous() for _, tensor in pair):
        return True
    begin, end = min(one.begin, other.begin), max(one.end, other.end)
    unit = math.gcd(*(step for at, t in pair for step in (t.itemsize, at - begin)))
    marks = torch.zeros((end - begin) // unit, dtype=torch.bool, device="cpu")
    first, second = (_elements(marks, tensor, (at - begin) // unit, unit) for at, tensor in pair)
    first.fill_(True)
    return bool(second.any())


def _elements(marks: Tensor, tensor: Tensor, offset: int, unit: int) -> Tensor:
    """What a tensor's elements are among marks of so many bytes each."""
    num = tensor.itemsize // unit
    strides = [stride * num for stride in tensor.stride()]
    return marks.as_strided((*tensor.shape, num), (*strides, 1), offset)


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in pairs)) * tensor.itemsize
