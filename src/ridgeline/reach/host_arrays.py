"""Arrays that torch does not hold, NumPy's and Python's own: compared bit for bit, and put back."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy

from ridgeline.reach.reach import Reach

MOST_COMPARED_BYTES = 1 << 26
"""A larger array of NumPy's is not compared where values are not copied: this one takes 20 ms. Code that
counts in an array has a small one."""


class HostArrays:
    """The arrays that can be reached, as they are now.

    Args:
        reach: What can be reached.
        most_bytes: Larger arrays of NumPy's are left out; those of Python's own are all copied.

    Cost: The memory of what it copies.
    """

    def __init__(self, reach: Reach, *, most_bytes: float) -> None:
        self._arrays = [(a, a.copy()) for a in reach.arrays if a.nbytes <= most_bytes]
        self._buffers: list[tuple[Any, Any]] = [(b, copy.copy(b)) for b in reach.buffers]

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Those whose elements are others now: what it is, in words, the copy, and the array."""
        for array, saved in self._arrays:
            if not _has_same_elements(array, saved):
                yield f"an array of NumPy of shape {tuple(array.shape)}", saved, array
        for buffer, saved in self._buffers:
            if bytes(buffer) != bytes(saved):
                kind = "a bytearray" if isinstance(buffer, bytearray) else "an array of Python"
                yield f"{kind} of {len(buffer)}", saved, buffer

    def restore(self) -> None:
        """Put the elements back."""
        for array, saved in self._arrays:
            if array.flags.writeable:
                numpy.copyto(array, saved)
        for buffer, saved in self._buffers:
            if bytes(buffer) != bytes(saved):
                buffer[:] = saved


def _has_same_elements(array: "numpy.ndarray[Any, Any]", saved: "numpy.ndarray[Any, Any]") -> bool:
    """Whether an array is bit for bit a copy of it; data sets are large, so that no other copy is made."""
    if array.dtype.hasobject:
        return all(a is b for a, b in zip(array.flat, saved.flat, strict=True))
    if not array.flags.c_contiguous:
        return array.tobytes() == saved.tobytes()
    now, before = (one.reshape(-1).view(numpy.uint8) for one in (array, saved))
    return numpy.array_equal(now, before)
