"""Constants of a batch: what is neither a tensor nor a container that torch's trees take apart.

An object that holds tensors (a graph of a library's, a dataclass) looks like a constant, and is none: its
text may leave elements out, and a captured program reads the tensors of that very object.
"""

import weakref
from typing import Any, cast

import numpy

from ridgeline.reach.reach import Reach

MOST_BYTES = 4096
"""Of an array of NumPy's whose elements are compared; a larger one counts as an object that holds tensors."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class TensorHolder:
    """An object that holds tensors or arrays itself; equal to another one only if both are of one object.

    Args:
        held: It is not kept: a batch that was looked at once must not hold its memory.

    Attributes:
        kind: The class of the object.
    """

    def __init__(self, held: Any) -> None:
        self.kind = type(held)
        try:
            self._object = cast("Any", weakref.ref(held))
        except TypeError:  # it has slots, and no place for weak references
            self._object = lambda: held

    def is_of(self, value: Any) -> bool:
        """Whether this is of that very object."""
        return value is not None and self._object() is value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorHolder) and other.is_of(self._object())

    def __hash__(self) -> int:
        return hash(self.kind)

    def __repr__(self) -> str:
        return f"<tensors in a {self.kind.__name__}>"


def constant(leaf: Any) -> str | TensorHolder:
    """What another leaf of a batch has to be equal in, to be the same constant.

    Cost: Walks through an object of a class; 1 us for what Python itself has.
    """
    if isinstance(leaf, numpy.ndarray) and leaf.nbytes <= MOST_BYTES and not leaf.dtype.hasobject:
        # Not its text, which rounds numbers.
        return f"{leaf.dtype} {leaf.shape} {leaf.tobytes()!r}"
    if type(leaf) not in _PLAIN:
        reach = Reach(leaf)
        if reach.tensors or reach.arrays or reach.lazy:
            return TensorHolder(leaf)
    return repr(leaf)
