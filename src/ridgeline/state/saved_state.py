"""Tensors and random state as they were at a moment, to be put back bitwise."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

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


@contextlib.contextmanager
def module_kept(module: Any, *, parameters: bool = True) -> Iterator[None]:
    """Random state, parameters and buffers of a module as before, at the end.

    Args:
        module: Of what is none, random state alone is kept.
        parameters: Without, parameters are not looked at.
    """
    if not isinstance(module, nn.Module):
        with preserved([]):
            yield
        return
    tensors = [*module.buffers(), *(module.parameters() if parameters else ())]
    with preserved(tensors), buffers_attached(module):
        yield


@contextlib.contextmanager
def buffers_attached(module: nn.Module) -> Iterator[None]:
    """Buffers that were replaced meanwhile are put back under their names, at the end; None as well."""
    # Not `named_buffers`, which leaves out those that are None, and further names of one tensor.
    before = [(inner, dict(inner._buffers)) for inner in module.modules()]  # noqa: SLF001
    try:
        yield
    finally:
        for inner, buffers in before:
            for name, tensor in buffers.items():
                setattr(inner, name, tensor)
