"""Running a program without a trace: random state, parameters and buffers are put back afterwards."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.tensors.copies import overlaps


@contextlib.contextmanager
def state_kept(module: Any) -> Iterator[None]:
    """Parameters and buffers of a module as before, at the end; nothing for what is no module."""
    if not isinstance(module, nn.Module):
        yield
        return
    with tensors_kept(module, (*module.parameters(), *module.buffers())):
        yield


@contextlib.contextmanager
def tensors_kept(module: nn.Module, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Values of some tensors of a module as before, at the end, and its buffers under their names.

    Tensors whose elements share memory are not written.
    """
    before = [(t, t.detach().clone()) for t in tensors if not overlaps(t)]
    try:
        with buffers_attached(module):
            yield
    finally:
        with torch.no_grad():
            for tensor, saved in before:
                tensor.copy_(saved)


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
