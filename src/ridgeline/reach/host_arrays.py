"""Arrays that torch does not hold, NumPy's and Python's own: compared bit for bit, and put back."""

import array
import copy
import ctypes
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
        # Without what classes derived from NumPy's do where one is copied or compared.
        found = [(a, numpy.asarray(a)) for a in reach.arrays]
        self._arrays = [(a, plain.copy()) for a, plain in found if plain.nbytes <= most_bytes]
        self._buffers: list[tuple[Any, Any]] = [(b, copy.copy(b)) for b in reach.buffers]

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Those whose elements are others now: what it is, in words, the copy, and the array."""
        for of_numpy, saved in self._arrays:
            if not _has_same_elements(numpy.asarray(of_numpy), saved):
                yield f"an array of NumPy of shape {tuple(of_numpy.shape)}", saved, of_numpy
        for buffer, saved in self._buffers:
            if bytes(buffer) != bytes(saved):
                yield _words_of(buffer), saved, buffer

    def restore(self) -> None:
        """Put the elements back."""
        for of_numpy, saved in self._arrays:
            if of_numpy.flags.writeable:
                numpy.copyto(numpy.asarray(of_numpy), saved)
        for buffer, saved in self._buffers:
            if bytes(buffer) != bytes(saved):
                if isinstance(buffer, (array.array, bytearray)):
                    buffer[:] = saved
                else:
                    ctypes.memmove(ctypes.addressof(buffer), bytes(saved), ctypes.sizeof(buffer))


def _words_of(buffer: Any) -> str:
    kind = "an array of Python" if type(buffer) is array.array else f"a {type(buffer).__name__}"
    is_of_c = not isinstance(buffer, (array.array, bytearray))
    return kind if is_of_c else f"{kind} of {len(buffer)}"


def _has_same_elements(now: "numpy.ndarray[Any, Any]", saved: "numpy.ndarray[Any, Any]") -> bool:
    """Whether an array is bit for bit a copy of it; data sets are large, so that no other copy is made."""
    if now.dtype.hasobject:
        return all(a is b for a, b in zip(now.flat, saved.flat, strict=True))
    if not now.flags.c_contiguous:
        return now.tobytes() == saved.tobytes()
    now, before = (one.reshape(-1).view(numpy.uint8) for one in (now, saved))
    return numpy.array_equal(now, before)
