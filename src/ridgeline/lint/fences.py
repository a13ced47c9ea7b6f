"""Memory with a fence on both sides of every tensor, which shows who wrote outside of his own."""

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

FENCE_BYTES = 1 << 16
"""On each side: wrong indices of vectorised loops miss by vectors and rows, far less than this."""
_ALIGNED = 64
_BYTE = 0xA5


class Fences:
    """Hands out tensors between fences, and says which fence is not as it was.

    What is held and no longer used elsewhere is looked at and given back at the next allocation.

    Attributes:
        broken: What was written outside of which tensor, in words.
    """

    def __init__(self) -> None:
        self.broken: list[str] = []
        self._held: list[tuple[numpy.ndarray, int, int, str]] = []

    def empty_strided(
        self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """A tensor that is not initialised, in the words of the compiler's programs."""
        sizes = tuple(size)
        if 0 in sizes:
            return torch.empty_strided(sizes, tuple(stride), dtype=dtype, device="cpu")
        # By strides: a tensor with gaps reaches further than it has elements.
        last = sum((n - 1) * s for n, s in zip(sizes, stride, strict=True))
        memory = self._memory((last + 1) * dtype.itemsize, f"{dtype} of shape {list(sizes)}")
        return _over(memory, 0, sizes, tuple(stride), dtype)

    def copies(self, values: Sequence[Any]) -> list[Any]:
        """The values, tensors copied to fenced memory; those that shared memory share it again."""
        made: dict[int, Tensor] = {}
        return [self._copy(value, made) if isinstance(value, Tensor) else value for value in values]

    def check(self) -> None:
        """Look at all fences that are still held."""
        for held in self._held:
            self._look(*held)

    def _copy(self, tensor: Tensor, made: dict[int, Tensor]) -> Tensor:
        storage = tensor.untyped_storage()
        # Empty storages have no address to know them again by.
        if not storage.nbytes():
            return tensor.clone()
        key = storage.data_ptr()
        if key not in made:
            source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            words = f"{tensor.dtype} of shape {list(tensor.shape)} (an input)"
            made[key] = self._memory(storage.nbytes(), words)
            made[key].copy_(source)
        offset = int(tensor.storage_offset())
        return _over(made[key], offset, tensor.size(), tensor.stride(), tensor.dtype)

    def _memory(self, size: int, words: str) -> Tensor:
        """So many bytes between two fences; their storage holds nothing else."""
        self._sweep()
        # NumPy's memory: its reference count tells when no tensor uses a block any more.
        block = numpy.full(size + 2 * FENCE_BYTES + _ALIGNED, _BYTE, dtype=numpy.uint8)
        at = block.ctypes.data + FENCE_BYTES
        begin = math.ceil(at / _ALIGNED) * _ALIGNED - block.ctypes.data
        self._held.append((block, begin, size, words))
        return torch.from_numpy(block[begin : begin + size])

    def _sweep(self) -> None:
        """Look at what is no longer used, and let it go."""
        kept = []
        while self._held:
            held = self._held.pop()
            # The tuple holds it, and the call does.
            if sys.getrefcount(held[0]) > 2:
                kept.append(held)
            else:
                self._look(*held)
        self._held = kept[::-1]

    def _look(self, block: numpy.ndarray, begin: int, size: int, words: str) -> None:
        before, after = block[:begin], block[begin + size :]
        for fence, side in ((before, "before"), (after, "after")):
            changed = int((fence != _BYTE).sum())
            if changed:
                self.broken.append(f"{changed} bytes {side} a tensor {words}")


def _over(
    memory: Tensor, offset: int, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> Tensor:
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(memory.untyped_storage(), offset, tuple(size), tuple(stride))
