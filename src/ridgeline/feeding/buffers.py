"""Buffers: memory for one leaf of a batch that is used again and again, whatever the leaf's shape.

What is handed out are views. As long as something holds one, or a view, a NumPy array or a graph made
from it, the storage has more owners than the buffer, and the buffer does not use it again.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

OWN_REFERENCES = 2
"""Owners of an unused storage: the buffer's tensor, and its handle on the storage."""


class TensorLayout(NamedTuple):
    """How a dense tensor lies in its memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    numel: int


def is_plain(leaf: Tensor) -> bool:
    """Whether the tensor is dense numbers and nothing more, so that a buffer can stand for it."""
    return (
        type(leaf) is Tensor
        and leaf.layout is torch.strided
        and not leaf.requires_grad
        and not leaf.is_conj()
        and not leaf.is_neg()
        and not (leaf.is_quantized or leaf.is_nested)
    )


def layout_of(leaf: Tensor) -> TensorLayout:
    """Shape and strides that a dense copy takes: the leaf's own unless it has gaps or overlaps."""
    if leaf.is_contiguous():
        return TensorLayout(leaf.shape, leaf.stride(), leaf.numel())
    # On `meta`, which allocates nothing: only `empty_like` knows which strides it gives.
    return TensorLayout(leaf.shape, torch.empty_like(leaf, device="meta").stride(), leaf.numel())


class Buffer:
    """Memory for one leaf; grows when needed and keeps its address otherwise.

    Args:
        allocate: Makes uninitialised one-dimensional memory of that many elements and dtype.
    """

    def __init__(self, allocate: Callable[[int, torch.dtype], Tensor]) -> None:
        self._allocate = allocate
        self._storage: torch.UntypedStorage | None = None
        self.memory: Tensor | None = None

    @property
    def is_held(self) -> bool:
        """Whether other code still refers to what was handed out."""
        if self._storage is None:
            return False
        owners: int = torch._C._storage_Use_Count(self._storage._cdata)  # noqa: SLF001 - no public way
        return owners > OWN_REFERENCES

    def fits(self, layout: TensorLayout) -> bool:
        """Whether the present memory is large enough."""
        return self.memory is not None and self.memory.numel() >= layout.numel

    def view(self, layout: TensorLayout, dtype: torch.dtype, capacity: int = 0) -> Tensor:
        """A view of the wanted layout, on new memory if the present is too small.

        The dtype is the same at every call; new memory has room for `capacity` elements, if that is more.
        """
        memory = self.memory
        if memory is None or memory.numel() < layout.numel:
            memory = self._allocate(max(layout.numel, capacity), dtype)
            self.memory, self._storage = memory, memory.untyped_storage()
        return memory.as_strided(layout.shape, layout.stride).detach()

    def drop(self) -> None:
        """Leave the memory to its holders."""
        self.memory = self._storage = None
