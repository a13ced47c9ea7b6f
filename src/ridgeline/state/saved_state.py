"""Tensors and random state as they were at a moment, to be put back bitwise."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ridgeline.state.random_state import HostGenerators
from ridgeline.tensors.copies import overlaps


class SavedState:
    """Tensors and random state as they are now, to be put back bitwise.

    Cost: Doubles the memory of the tensors as long as it lives.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        # An expanded tensor shares memory between its elements, so it is not written: nothing to save.
        self.tensors = [tensor for tensor in tensors if not overlaps(tensor)]
        self._copies = [tensor.detach().clone() for tensor in self.tensors]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._host = HostGenerators.now()

    def restore_tensors(self) -> None:
        """Write the saved values into the tensors, in place."""
        with torch.no_grad():
            for tensor, saved in zip(self.tensors, self._copies, strict=True):
                tensor.copy_(saved)

    def restore(self) -> None:
        """Put tensors and random state back."""
        self.restore_tensors()
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        self._host.restore()


@contextlib.contextmanager
def preserved(tensors: list[Tensor]) -> Iterator[SavedState]:
    """Whatever happens inside, tensors and random state are afterwards as they were."""
    saved = SavedState(tensors)
    try:
        yield saved
    finally:
        saved.restore()
