"""Tensors and random state as they were at a moment, to be put back bitwise."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ridgeline.reach.generators import Generators
from ridgeline.tensors.copies import overlaps


class SavedState:
    """Tensors and random state as they are now, to be put back bitwise.

    Cost: Doubles the memory of the tensors as long as it lives.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        # An expanded tensor shares memory between its elements, so it is not written: nothing to save.
        self.tensors = [tensor for tensor in tensors if not overlaps(tensor)]
        self._copies = [tensor.detach().clone() for tensor in self.tensors]
        self._generators = Generators()

    def restore_tensors(self) -> None:
        """Write the saved values into the tensors, in place."""
        with torch.no_grad():
            for tensor, saved in zip(self.tensors, self._copies, strict=True):
                tensor.copy_(saved)

    def restore(self) -> None:
        """Put tensors and random state back."""
        self.restore_tensors()
        self._generators.restore()


@contextlib.contextmanager
def preserved(tensors: list[Tensor]) -> Iterator[SavedState]:
    """Whatever happens inside, tensors and random state are afterwards as they were."""
    saved = SavedState(tensors)
    try:
        yield saved
    finally:
        saved.restore()
